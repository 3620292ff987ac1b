"""Trial forward: runs a pipelined model without its layers before the first call of each kind.

Errors of a stage show on all ranks before anything is sent, instead of in the middle of a schedule, where the other
ranks would hang.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..compat.shared import Shared
from ..compat.torch_modules import running_uncompiled
from ..data_parallel.fsdp import reshard
from ..errors import MegatronError, UnsupportedError
from ..losses.batch_loss import LossDenominators
from ..losses.inline_losses import with_known_targets
from ..losses.targets import target_names, with_codebooks, with_every_label
from ..parallel_state import ParallelState
from .off_stage_images import OffStageImages
from .outputs import VALUES_OF_ROWS, read_loss, read_sample_outputs
from .split_model import ModelPartition


class TrialForward(Shared):
    """Trial forwards of one model's calls.

    Args:
        forward (`Callable`): the model's own forward.
        images (`OffStageImages`): adapts its arguments to each stage.

    Attributes:
        logits: names of the outputs `[batch, ...]` of the last stage.
    """

    def __init__(
        self, model: Any, state: ParallelState, cut: ModelPartition, forward: Callable[..., Any], images: OffStageImages
    ):
        self._images = images
        self.model, self.mesh, self.loss, self.cut = model, state.mesh, state.loss, cut
        self._forward, self._parameters = forward, inspect.signature(forward).parameters
        self._ranks, self._in_lockstep = state.config.pp_size, state.in_lockstep
        self._shards_weights = state.shards_weights
        self._done: set[Hashable] = set()
        self.logits: tuple[str, ...] = ("logits",)

    def of_call(self, arguments: dict[str, Any], *, is_read: bool) -> None:
        """Runs this rank's stages without their layers, and raises the errors of all ranks on every rank.

        Args:
            arguments: arguments of a microbatch.
            is_read (`bool`): whether the caller reads the last stage's output itself instead of its loss and logits.

        Raises:
            UnsupportedError: if a stage of any rank failed.
        """
        names = frozenset(name for name, value in arguments.items() if value is not None)
        # In lockstep a forward is collective over dp, so the key must be the same on all dp ranks.
        kind = (self.model.training, target_names(arguments), is_read, None if self._in_lockstep else names)
        if kind in self._done:
            return
        local_error: MegatronError | None = None
        batch_error: Exception | None = None
        logits: tuple[str, ...] | None = None
        try:
            logits = self._run_without_layers(arguments, is_read=is_read)
        except (AttributeError, TypeError) as error:
            local_error = UnsupportedError(
                f"The forward needs something that its pipeline stage does not have ({error})."
            )
            local_error.__cause__ = error
        except MegatronError as error:
            local_error = error
        except Exception as error:  # noqa: BLE001
            # Errors of the batch, which a single process raises too: the schedule will raise them on some stages.
            batch_error = error if isinstance(error, ValueError | IndexError) else None
        of_ranks: list[Any] = [None] * self._ranks
        # Which outputs the loop reads is merged over ranks: a stage with one layer leaves before its loop reads any.
        said = (
            None if local_error is None else str(local_error),
            logits,
            batch_error is not None,
            self.cut.boundary.carried.read,
        )
        dist.all_gather_object(of_ranks, said, group=self.mesh.pp_group)
        self.cut.boundary.carry(place for *_, read in of_ranks for place in read)
        if batch_error is not None and all(is_wrong for *_, is_wrong, _ in of_ranks):
            raise batch_error
        for rank, (judgment, *_) in enumerate(of_ranks):
            if judgment is not None:
                raise UnsupportedError(
                    f"{type(self.model).__name__} on pp rank {rank}: {judgment} Nothing has been computed yet."
                ) from (local_error if rank == self.mesh.pp_rank else None)
        self.logits = next((names for _, names, *_ in of_ranks if names), self.logits)
        self._done.add(kind)

    @torch.no_grad()
    def _run_without_layers(self, arguments: dict[str, Any], *, is_read: bool) -> tuple[str, ...] | None:
        """Returns the names of the outputs `[batch, ...]` on the last stage's rank; `None` on other ranks."""
        plain = with_every_label(arguments)
        part = with_known_targets(plain, self.loss)
        names: tuple[str, ...] | None = None
        if "output_router_logits" in self._parameters:
            # Router logits are recorded by layers, which do not run.
            part["output_router_logits"] = False
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        # Compiled norms and heads would be compiled for placeholders.
        with (
            torch.random.fork_rng(devices),
            quiet_autocast(),
            running_uncompiled(self.model),
            self.cut.boundary.running_trial(),
        ):
            for stage in self.cut.boundary.stages.of_rank(self.mesh.pp_rank):
                with self.loss.with_denominators(
                    LossDenominators(dict.fromkeys(with_codebooks(plain), 1.0), 1.0, plain, is_probe=True)
                ):
                    seen = self._images.arguments(part, stage, is_probe=True)
                    output = self.cut.boundary.run(stage, None, functools.partial(self._forward, **seen))
                    if stage == len(self.cut.boundary.stages.ranges) - 1 and not is_read:
                        if target_names(arguments):
                            read_loss(output, self.model, self.loss, arguments)
                            names = tuple(name for name in VALUES_OF_ROWS if output.get(name) is not None)
                        else:
                            names = tuple(read_sample_outputs(output, self.model))
        if self._shards_weights:
            reshard(self.cut.ends(self.model))
        return names


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of autocast for a device type, or `None` if autocast is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def quiet_autocast() -> Iterator[None]:
    """Disables autocast's weight cache inside: a cached cast would be part of several microbatches' graphs."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)

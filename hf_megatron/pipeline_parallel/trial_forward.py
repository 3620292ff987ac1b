"""Runs a pipelined model without its layers before the first call of a kind.

What a pipeline cannot do shows before anything is sent, not in the middle of a schedule.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..compat.shared import Shared
from ..data_parallel.fsdp import reshard
from ..errors import MegatronError, UnsupportedError
from ..losses.batch_loss import Share
from ..losses.inline_losses import with_known_targets
from ..losses.targets import target_names, with_codebooks, with_every_label
from ..parallel_state import ParallelState
from .off_stage_images import OffStageImages
from .outputs import VALUES_OF_ROWS, read_loss, read_sample_outputs
from .split_model import ModelPartition


class TrialForward(Shared):
    """The rehearsals of one model's calls.

    Args:
        forward (`Callable`): the model's own.
        images (`OffStageImages`): fits its arguments to stages.

    Attributes:
        logits: names of what the last stage returns `[rows, ...]`.
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
        """Runs this rank's stages without their layers, and raises on every rank what any of them found.

        Args:
            arguments: of a microbatch.
            is_read (`bool`): whether the caller reads what the last stage returns, in place of its loss and logits.
        """
        names = frozenset(name for name, value in arguments.items() if value is not None)
        # Where dp ranks wait for each other in a forward, all of them do it in the same call.
        kind = (self.model.training, target_names(arguments), is_read, None if self._in_lockstep else names)
        if kind in self._done:
            return
        found: MegatronError | None = None
        wrong: Exception | None = None
        logits: tuple[str, ...] | None = None
        try:
            logits = self._run_without_layers(arguments, is_read=is_read)
        except (AttributeError, TypeError) as error:
            found = UnsupportedError(f"Parts of it were not found where the pipeline is cut ({error}).")
            found.__cause__ = error
        except MegatronError as error:
            found = error
        except Exception as error:  # noqa: BLE001
            # What a batch does wrong on some stages shows in the schedule as in one process, by the same exception.
            wrong = error if isinstance(error, ValueError | IndexError) else None
        of_ranks: list[Any] = [None] * self._ranks
        # A stage of one layer leaves before its loop unpacks anything.
        said = (None if found is None else str(found), logits, wrong is not None, self.cut.boundary.carried.read)
        dist.all_gather_object(of_ranks, said, group=self.mesh.pp_group)
        self.cut.boundary.carry(place for *_, read in of_ranks for place in read)
        if wrong is not None and all(is_wrong for *_, is_wrong, _ in of_ranks):
            raise wrong
        for rank, (reason, *_) in enumerate(of_ranks):
            if reason is not None:
                raise UnsupportedError(
                    f"{type(self.model).__name__} on pp rank {rank}: {reason} Nothing has been computed yet."
                ) from (found if rank == self.mesh.pp_rank else None)
        self.logits = next((names for _, names, *_ in of_ranks if names), self.logits)
        self._done.add(kind)

    def require_same(self, logits: tuple[str, ...]) -> None:
        """Raises `UnsupportedError` where the last stage returns others than the ranks before it know of."""
        if logits != self.logits:
            raise UnsupportedError(
                f"{type(self.model).__name__} returns {', '.join(logits)}, and {', '.join(self.logits)} are expected "
                "of the last stage. Call it without a cache first, or load it with pp_size=1."
            )

    @torch.no_grad()
    def _run_without_layers(self, arguments: dict[str, Any], *, is_read: bool) -> tuple[str, ...] | None:
        """Returns the names of the logits on the rank of the last stage, as far as it has any."""
        plain = with_every_label(arguments)
        part = with_known_targets(plain, self.loss)
        names: tuple[str, ...] | None = None
        if "output_router_logits" in self._parameters:
            # Layers record them.
            part["output_router_logits"] = False
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices), quiet_autocast(), self.cut.boundary.running_trial():
            for stage in self.cut.boundary.stages.of_rank(self.mesh.pp_rank):
                with self.loss.over(Share(dict.fromkeys(with_codebooks(plain), 1.0), 1.0, plain, is_probe=True)):
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
    """Returns the dtype that autocast casts to on a kind of device, where it is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def quiet_autocast() -> Iterator[None]:
    """Casts weights for each microbatch: a cached cast would be part of several graphs."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)

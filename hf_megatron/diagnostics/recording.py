"""Recorder of one training step: module outputs, their gradients, and the weights.

Every rank writes its local tensors with the samples, tokens, and features of the global batch that each covers. No
collectives run and nothing is gathered: `recorded_shards.py` does that when two recordings are compared. The two may
come from a single process and any layout, from two versions, or from two checkpoints.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..compat.ecosystem import strip_adapter_prefix
from ..compat.shard_safe import runs_last
from ..compat.torch_autograd import in_backward
from ..compat.torch_dtensor import local_tensor
from ..compat.versions import __version__
from ..context_parallel.load_balancing import Interval
from ..core.off_stage import local_named_parameters
from ..data_parallel.distributed_optimizer import stepping_optimizer
from ..errors import ConfigError, UnsupportedError
from ..parallel_state import is_rerunning_step, parallel_state, unwrap_parallel_model
from .batch_index import PlaceInBatch

# The `kind` in the JSON files.
RECORDING = "recording"
BEFORE, OUTPUT, LOSS, OUTPUT_GRADIENT, GRADIENT, AFTER = (
    "weight before the step",
    "output",
    "loss",
    "gradient of the output",
    "gradient",
    "weight after the step",
)


@dataclass(frozen=True)
class RecordedPiece:
    """The local chunk of one tensor on one rank.

    Attributes:
        kind, name: what the tensor is, such as `"output"`, and the name of its module or parameter.
        call: index of the module's call in one forward; 0 unless a module is called several times.
        order: number of chunks that the rank recorded before.
        key: name of the chunk in the rank's file.
        held: for each dim of the full tensor, the `[start, stop)` intervals of this chunk, in order; `None` for all
            entries or for one of several equal shards.
        share: (index, count) of the equal shard along the last dim, if `held` has `None` there.
        depth: layers that the step had passed through.
    """

    kind: str
    name: str
    call: int
    order: int
    key: str
    held: tuple[tuple[Interval, ...] | None, ...]
    share: tuple[int, int] = (0, 1)
    depth: int = 0


class StepRecorder:
    """Records what a model computes in one optimizer step into a folder; create one on every rank.

        with StepRecorder("recordings/tp2", model, optimizer):
            model(**batch).loss.backward()
            optimizer.step()

    Also works on a stock model in a single process. Its batch must have the samples of all ranks in rank order: the
    samples of data-parallel rank 0 first.

    Args:
        directory: created if missing; must hold no recording yet.
        model: parallelized or stock.
        optimizer (*optional*): its step is recorded too: the gradients it uses, and the weights after it.
        modules (`str`, *optional*): a regular expression; outputs of modules whose name matches are recorded. The
            default records all, which takes twice the memory of the step's activations.

    Raises:
        ConfigError: the folder has a recording, or the pattern matches no module name.
        UnsupportedError: weights sharded by ZeRO-3, which are unsharded only briefly.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        modules: str = "",
    ):
        self.directory, self.model, self.optimizer = Path(directory), model, stepping_optimizer(optimizer)
        self.inner, self.state = unwrap_parallel_model(model), parallel_state(model)
        if self.state is not None and self.state.shards_weights:
            raise UnsupportedError(
                "StepRecorder with zero_stage=3 is not supported: full weights are available only during forward and "
                "backward. Use zero_stage=2 or below."
            )
        self.rank = 0 if self.state is None else dist.get_rank()
        if self._file("json").exists():
            raise ConfigError(
                f"StepRecorder({str(directory)!r}): the folder already has a recording; choose another one."
            )
        named = {strip_adapter_prefix(name): module for name, module in self.inner.named_modules()}
        local_ids = {id(parameter) for _, parameter in local_named_parameters(self.inner)}
        self.modules = {
            name: module
            for name, module in named.items()
            # Modules without local weights are submodules of the recorded ones, or off-stage placeholders.
            if name and re.search(modules, name) and any(id(weight) in local_ids for weight in module.parameters())
        }
        if not self.modules:
            raise ConfigError(f"StepRecorder(modules={modules!r}): matches no module name.")
        self._tensors: dict[str, Tensor] = {}
        self._pieces: list[RecordedPiece] = []
        self._losses: list[float] = []
        self._is_loss_term = False
        self._calls = PlaceInBatch()
        self._hooks: list[Any] = []

    def _file(self, kind: str) -> Path:
        return self.directory / f"rank{self.rank:05}.{kind}"

    def __enter__(self) -> "StepRecorder":
        self._weights(BEFORE)
        hooks = [self.inner.register_forward_pre_hook(self._begin_call, with_kwargs=True)]
        hooks += [module.register_forward_hook(self._make_output_hook(name)) for name, module in self.modules.items()]
        hooks.append(self.inner.register_forward_hook(self._end_call))
        if self.optimizer is not None:
            hooks.append(self.optimizer.register_step_pre_hook(lambda *args: self._gradients()))
        self._hooks = hooks
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            if self.optimizer is not None:
                self._weights(AFTER)
            self._write()

    # Hooks

    def _begin_call(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not in_backward() and not is_rerunning_step(self.state):
            # With `num_items_in_batch` the loss is this rank's term of the mean over all tokens of the step.
            self._is_loss_term = kwargs.get("num_items_in_batch") is not None
            self._calls.begin(self.state, args, kwargs)

    @runs_last
    def _end_call(self, model: nn.Module, args: Any, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor) and not in_backward() and not is_rerunning_step(self.state):
            self._losses.append(float(loss.detach()))

    def _make_output_hook(self, name: str) -> Any:
        @runs_last
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Recomputation in the backward repeats outputs that were already recorded.
            if in_backward() or is_rerunning_step(self.state) or self._calls.is_trial_forward(self.state):
                return
            value = next((value for value in tree_iter(output) if _is_hidden(value)), None)
            place = None if value is None else self._calls.place(self.state, name, value)
            if value is None or place is None:
                return
            held, call, depth = place
            features, shard = self._local_features(name, value)
            if features is not None:
                held = (*held[:2], features)
            self._add(OUTPUT, name, call, value, held, shard, depth)
            if value.requires_grad and self._is_complete(name, held):
                value.register_hook(
                    lambda gradient: self._add(OUTPUT_GRADIENT, name, call, gradient, held, shard, depth)
                )

        return hook

    def _local_features(self, name: str, value: Tensor) -> tuple[tuple[Interval, ...] | None, Interval]:
        """Returns the features of an output by its linear's sharding, or the `(index, count)` of a possible shard."""
        if self.state is None:
            return None, (0, 1)
        sharding = self.state.shardings.get(f"{name}.weight")
        if sharding is not None and len(sharding.shape) == 2 and not isinstance(self.modules[name], nn.Embedding):
            intervals = sharding.placement.intervals(sharding.shape, self.state.axes)[0]
            if sum(stop - start for start, stop in intervals) == value.shape[-1]:
                return tuple(intervals), (0, 1)
        return None, (self.state.axes.rank("tp"), self.state.axes.size("tp"))

    def _is_complete(self, name: str, held: Sequence[tuple[Interval, ...] | None]) -> bool:
        """Returns whether an output's gradient is complete, not a partial value that ranks reduce later.

        It is partial for copied heads, for adapter factors, and for sequences that are sharded by context parallelism
        after this module.
        """
        if self.state is None:
            return True
        sharding, has_rows = self.state.shardings.get(f"{name}.weight"), held[1] == ((0, self._calls.lengths[0]),)
        is_copied = sharding is not None and any(split.copies > 1 for split in sharding.placement.splits)
        is_added_up = sharding is not None and sharding.gradient.sum is not None and has_rows
        return not is_copied and not is_added_up and not (self.state.axes.size("cp") > 1 and has_rows)

    def _add(
        self,
        kind: str,
        name: str,
        call: int,
        value: Tensor,
        held: Sequence[tuple[Interval, ...] | None],
        share: Interval = (0, 1),
        depth: int = 0,
    ) -> None:
        key = f"{len(self._pieces)}"
        self._tensors[key] = local_tensor(value).detach().to("cpu", copy=True).contiguous()
        self._pieces.append(RecordedPiece(kind, name, call, len(self._pieces), key, tuple(held), share, depth))

    def _weights(self, kind: str) -> None:
        for name, parameter in self._own():
            self._add(kind, name, 0, parameter, self._held(name, parameter))

    def _own(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in local_named_parameters(self.model):
            yield strip_adapter_prefix(name), parameter

    def _gradients(self) -> None:
        """Records the gradients that the optimizer will use, each in the shape of the local parameter."""
        engine: Any = None if self.state is None else self.state.data_parallel
        reducer = None if engine is None else engine.reducer
        if reducer is not None:
            reducer.finish()
        for name, parameter in self._own():
            if parameter.requires_grad:
                gradient = parameter.grad if reducer is None else reducer.full_gradient(parameter)
                if gradient is not None:
                    self._add(GRADIENT, name, 0, gradient, self._held(name, parameter))

    def _held(self, name: str, parameter: Tensor) -> tuple[tuple[Interval, ...], ...]:
        if self.state is None or name not in self.state.shardings:
            return tuple(((0, size),) for size in parameter.shape)
        shape = self.state.shardings[name].shape
        return tuple(map(tuple, self.state.placement(name).intervals(shape, self.state.axes)))

    def _write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        save_file(self._tensors, self._file("safetensors"))
        tied = dict(getattr(self.inner, "all_tied_weights_keys", {}))
        header = {
            "kind": RECORDING,
            "version": __version__,
            "model": type(self.inner).__name__,
            "layout": "" if self.state is None else self.state.config.layout(),
            "ranks": 1 if self.state is None else dist.get_world_size(),
            # Number of ranks over which gradients are averaged.
            "factor": 1 if self.state is None else self.state.axes.size("dp_cp"),
            "loss": sum(self._losses) / (1 if self._is_loss_term else max(1, len(self._losses))),
            # Data-parallel rank whose term of the mean the loss is; `None` if it is the full loss.
            "share_of_loss": None if not self._is_loss_term else 0 if self.state is None else self.state.mesh.dp_rank,
            "depth": self._calls.depth,
            "tied": tied,
            "pieces": [asdict(piece) for piece in self._pieces],
        }
        # Written last: a folder without this file has no recording.
        self._file("json").write_text(json.dumps(header), encoding="utf-8")


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 3)

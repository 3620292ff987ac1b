"""Hooks that find non-finite values in one model call: inputs, module outputs, loss, gradients, and weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..compat.ecosystem import strip_adapter_prefix
from ..compat.shard_safe import runs_last
from ..compat.torch_autograd import in_backward
from ..compat.torch_dtensor import local_tensor
from ..core.off_stage import local_named_parameters
from ..models.fingerprint import layer_patterns
from ..parallel_state import ParallelState

WEIGHT, INPUT, OUTPUT, LOSS, GRADIENT = "weight", "input", "output", "loss", "gradient"
INPUT_GRADIENT = "gradient of the input"
_SAID = {
    INPUT: "argument",
    OUTPUT: "output of",
    LOSS: "loss of",
    GRADIENT: "gradient of the output of",
    INPUT_GRADIENT: "gradient of the input of",
}
# Execution order within a step.
_PHASES = {WEIGHT: 0, INPUT: 1, OUTPUT: 1, LOSS: 2, GRADIENT: 3, INPUT_GRADIENT: 3}


@dataclass(frozen=True)
class NonFinite:
    """A non-finite value in a step.

    Attributes:
        kind: `"weight"`, `"input"` (of the model), `"output"` (of a module), `"loss"`, `"gradient"` (of an output), or
            `"gradient of the input"` (of a layer).
        name: of the parameter, the argument, or the module; `""` is the model itself.
        rank: global rank.
        call: index of the model call in the step.
        microbatch: index in the call, with a pipeline; otherwise 0.
        stage: pipeline stage.
        entry: for a weight, index of the first non-finite entry in the full tensor; stacked experts are indexed by
            expert first.
        after: for a gradient, the module whose output gradient was recorded last before it: the backward from there
            produced the value. If several modules read the same input, it is one of them.
    """

    kind: str
    name: str
    rank: int
    call: int = 0
    microbatch: int = 0
    stage: int = 0
    entry: tuple[int, ...] = ()
    after: str = ""

    def __str__(self) -> str:
        name = self.name or "the model"
        if self.kind == WEIGHT:
            return f"rank {self.rank}: weight {name} at {list(self.entry)}"
        where = f"call {self.call} of the step, microbatch {self.microbatch}, stage {self.stage}"
        after = f", in the backward after the output of {self.after}" if self.after else ""
        return f"rank {self.rank}: {_SAID[self.kind]} {name}{after}, {where}"


# Sort key in execution order, and the value.
Found = tuple[tuple[int, ...], NonFinite]


class CallCheck:
    """Checks the outputs of all modules of a model in one call, and their gradients."""

    def __init__(self, model: nn.Module, state: ParallelState, call: int):
        self.model, self.state, self.call = model, state, call
        # Kind, name, microbatch, stage, and a 0-dim flag on the device: whether all entries are finite.
        self._seen: list[tuple[str, str, int, int, Tensor]] = []
        self._followed: set[Any] = set()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Checks the call made inside the context, and its backward."""
        hooks = [
            module.register_forward_hook(self._make_output_hook(name), always_call=False)
            for name, module in self.model.named_modules()
            if module is not self.model
        ]
        hooks += [
            self.model.get_submodule(name).register_forward_pre_hook(self._make_input_hook(name))
            for name in layer_patterns(self.model)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _make_output_hook(self, name: str) -> Callable[..., None]:
        @runs_last
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # Recomputation in the backward repeats outputs that were already checked.
            if in_backward() or (place := self._place()) is None:
                return
            for value in _floats(output):
                self._look(OUTPUT, name, *place, value.detach())
                # An output that a submodule returned unchanged already has a hook.
                if value.requires_grad and value.grad_fn not in self._followed:
                    self._followed.add(value.grad_fn)
                    value.register_hook(lambda gradient: self._look(GRADIENT, name, *place, gradient))

        return hook

    def _make_input_hook(self, name: str) -> Callable[..., None]:
        """Returns a pre-hook for a layer: the input that a stage receives is the output of no local module."""

        @runs_last
        def hook(module: nn.Module, args: Any) -> None:
            if in_backward() or (place := self._place()) is None:
                return
            for value in _floats(args):
                if value.requires_grad:
                    value.register_hook(lambda gradient: self._look(INPUT_GRADIENT, name, *place, gradient))

        return hook

    def _place(self) -> tuple[int, int] | None:
        """Returns the current microbatch and stage; `None` in a pipeline's trial forward or padding microbatch."""
        if self.state.pipeline is None:
            return 0, 0
        part, cut = self.state.call.span, self.state.cut
        if part is None or part.is_repeated:
            return None
        rows = part.first_token // part.tokens if part.tokens else 0
        return rows // max(part.rows, 1), cut.boundary.stage  # type: ignore[union-attr]

    def _look(self, kind: str, name: str, microbatch: int, stage: int, value: Tensor) -> None:
        self._seen.append((kind, name, microbatch, stage, torch.isfinite(local_tensor(value)).all()))

    def look_at_inputs(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Checks the model's arguments."""
        named = {str(place): value for place, value in enumerate(args)} | kwargs
        for name, value in named.items():
            for tensor in _floats(value):
                self._look(INPUT, name, 0, 0, tensor.detach())

    def look_at_loss(self, value: Tensor) -> None:
        """Checks the loss, a scalar."""
        self._look(LOSS, "", 0, 0, value.detach())

    def found(self) -> list[Found]:
        """Returns the non-finite values; synchronizes with each device once."""
        if not self._seen:
            return []
        devices = {flag.device for *_, flag in self._seen}
        finite = {
            id(flag): value
            for device in devices
            for flag, value in _values([flag for *_, flag in self._seen if flag.device == device])
        }
        rank, findings, last = dist.get_rank(), [], ""
        for place, (kind, name, microbatch, stage, flag) in enumerate(self._seen):
            if not finite[id(flag)]:
                after = last if kind in (GRADIENT, INPUT_GRADIENT) else ""
                one = NonFinite(kind, name, rank, self.call, microbatch, stage, after=after)
                findings.append((_order(one, place), one))
            last = name if kind == GRADIENT else last
        return findings


def _order(one: NonFinite, place: int) -> tuple[int, ...]:
    """Returns a sort key in execution order; `place` is the order on its rank."""
    phase = _PHASES[one.kind]
    stage = -one.stage if phase == _PHASES[GRADIENT] else one.stage
    return int(one.kind != WEIGHT), one.call, phase, one.microbatch, stage, place, one.rank


def _values(flags: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Reads the flags of one device with a single synchronization."""
    return zip(flags, torch.stack([*flags]).tolist(), strict=True)


def _floats(values: Any) -> Iterator[Tensor]:
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value


def nonfinite_weights(model: Any, state: ParallelState) -> Iterator[Found]:
    """Yields the local weights with non-finite values, with the index of the first one in the full tensor."""
    rank = dist.get_rank()
    for place, (outer_name, parameter) in enumerate(local_named_parameters(model)):
        name = strip_adapter_prefix(outer_name)
        local = local_tensor(parameter).detach()
        if not local.is_floating_point() or bool(torch.isfinite(local).all()):
            continue
        entry = [int(number) for number in torch.nonzero(~torch.isfinite(local))[0]]
        if name in state.shardings and not state.shards(name):
            held = state.placement(name).intervals(state.shardings[name].shape, state.axes)
            entry = [_global(index, ranges) for index, ranges in zip(entry, held, strict=True)]
        cut: Any = state.cut
        one = NonFinite(WEIGHT, name, rank, stage=0 if cut is None else cut.stage_of(name), entry=tuple(entry))
        yield _order(one, place), one


def _global(index: int, ranges: Sequence[tuple[int, int]]) -> int:
    for start, stop in ranges:
        if index < stop - start:
            return start + index
        index -= stop - start
    return index

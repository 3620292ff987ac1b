"""Allocation tracker that counts each unit of a model separately: its layers, and the parts before and after them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..compat.shard_safe import shard_safe
from ..compat.torch_autograd import in_backward
from ..compat.torch_distributed import get_group_description
from ..compat.torch_memory import is_fake, storage_key
from ..diagnostics.allocation_tracker import AllocationTracker
from .unit_work import Work

# Units that are not layers.
BEFORE, AFTER = "before the layers", "after the layers"
_aten = torch.ops.aten
_PRODUCTS: Mapping[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten._grouped_mm.default: (0, 1),
}
# The attention backward takes five products where the forward takes two; one of the five is recomputed.
_ATTENTION_BACKWARD = 2.5
# Collectives whose largest tensor has the data of all ranks: a rank sends all but its own shard.
_WHOLE = ("allgather", "reduce_scatter", "alltoall", "gather", "scatter")


@dataclass
class UnitFigures:
    """Figures of a unit in one step with one microbatch.

    Attributes:
        forward, backward: its work.
        forward_growth: bytes in use at the end of its forward, relative to the start.
        forward_peak: peak bytes during its forward, relative to the start.
        backward_growth, backward_peak: the same for its backward; the growth is negative where it frees more saved
            activations than it allocates.
    """

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    forward_growth: int = 0
    forward_peak: int = 0
    backward_growth: int = 0
    backward_peak: int = 0


class UnitTracker(AllocationTracker):
    """Counts a step as `AllocationTracker` does, but by unit: module names of layers, `BEFORE` and `AFTER` the layers.

    The backward of a unit begins when the gradient of its forward's output arrives.

    Args:
        model: as in `AllocationTracker`.
        sizes: axis -> number of ranks.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int]):
        super().__init__(model)
        self.units: dict[str, UnitFigures] = {}
        self._sizes = sizes
        self._unit, self._is_backward = BEFORE, False
        self._present = 0

    def begin_step(self, kept: Mapping[str, Sequence[Tensor]]) -> None:
        """Starts new figures for all units."""
        super().begin_step(kept)
        self.units = {}
        self._unit, self._is_backward = BEFORE, False
        self._present, _ = self.window()

    def end_step(self) -> None:
        """Closes the figures of the last unit that ran."""
        self._turn_to(self._unit, self._is_backward)

    def _turn_to(self, unit: str, is_backward: bool) -> None:
        """Closes the window of the current unit and opens one for `unit`."""
        before = self._present
        self._present, most = self.window()
        figures = self.units.setdefault(self._unit, UnitFigures())
        change = self._present - before
        if self._is_backward:
            # A unit may run in several windows: its peak includes the growth in earlier ones.
            figures.backward_peak = max(figures.backward_peak, figures.backward_growth + most - before)
            figures.backward_growth += change
        else:
            figures.forward_peak = max(figures.forward_peak, figures.forward_growth + most - before)
            figures.forward_growth += change
        self._unit, self._is_backward = unit, is_backward

    def _enter_backward(self, unit: str, gradient: Tensor) -> Tensor:
        if not (self._is_backward and self._unit == unit):
            self._turn_to(unit, True)
        return gradient

    @shard_safe
    def _before(self, module: nn.Module, args: Any) -> None:
        super()._before(module, args)
        name = self._names.get(id(module))
        if name in self._layers and not in_backward():
            if self._unit == BEFORE:
                self._watch(BEFORE, args)
            self._turn_to(name, False)

    @shard_safe
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        super()._after(module, args, output)
        name = self._names.get(id(module))
        if name in self._layers and not in_backward():
            self._watch(name, output)
            self._turn_to(AFTER, False)

    def _watch(self, unit: str, values: Any) -> None:
        for value in tree_iter(values):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self._enter_backward(unit, gradient))
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if in_backward() and not self._is_backward:
            self._turn_to(AFTER, True)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if output is NotImplemented or func.namespace != "aten" or func.is_view or self._is_stepping:
            return output
        taken = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        outputs = [value for value in tree_iter(output) if isinstance(value, Tensor)]
        if any(map(is_fake, outputs)) and not _is_alias(func, taken, outputs):
            self._work(_estimate_work(func, args, taken, outputs))
        return output

    def _count_collective(self, func: Any, args: tuple) -> None:
        super()._count_collective(func, args)
        if self._is_stepping:
            return
        group = get_group_description(args).removeprefix("mesh_")
        ranks = self._sizes.get(group, 1)
        size = max((sum(t.nbytes for t in tree_iter(value) if isinstance(t, Tensor)) for value in args), default=0)
        name = func._schema.name.partition("::")[2].strip("_")
        fraction = (ranks - 1) / ranks
        sent = size * (fraction if any(map(name.__contains__, _WHOLE)) else 2 * fraction if "allreduce" in name else 1)
        self._work(Work(kernels=1, traffic={group: (1, sent)}))

    def _work(self, work: Work) -> None:
        if in_backward() and not self._is_backward:
            self._turn_to(AFTER, True)
        figures = self.units.setdefault(self._unit, UnitFigures())
        if self._is_backward:
            figures.backward += work
        else:
            figures.forward += work


def _is_alias(func: Any, taken: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Returns whether nothing was computed: the output is a view, or a new tensor without values."""
    if func._schema.is_mutable:
        return False
    if not taken:
        return func is _aten.empty.memory_format
    there = {storage_key(tensor) for tensor in taken}
    return func in (_aten.empty_like.default, _aten.new_empty.default, _aten.detach.default) or all(
        storage_key(tensor) in there for tensor in outputs
    )


def _estimate_work(func: Any, args: tuple, taken: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
    name = func._schema.name
    if func in _PRODUCTS:
        one, other = (args[place] for place in _PRODUCTS[func])
        flops, width = _product(one, other, outputs[0])
        return Work(matmuls={width: flops}, kernels=1)
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return Work(attention=_attention(name, func, args), kernels=1)
    moved = sum(tensor.nbytes for tensor in (*taken, *outputs))
    if func._schema.is_mutable:
        # The output of an in-place operation is one of its inputs: do not count it twice.
        moved = sum(tensor.nbytes for tensor in taken)
    return Work(moved=moved, kernels=1)


def _product(one: Tensor, other: Tensor, result: Tensor) -> tuple[float, int]:
    """Returns `2 m k n` and the smallest dim of a product `[..., m, k] x [..., k, n]`, or of one product per expert."""
    inner = one.shape[-1]
    if one.dim() == 2 and other.dim() == 3:
        experts, _, columns = other.shape
        return 2.0 * one.shape[0] * inner * columns, max(1, min(one.shape[0] // experts, inner, columns))
    if one.dim() == 2 and result.dim() == 3:
        # Weight gradients of the experts: the inner dim is the token dim.
        experts = result.shape[0]
        return 2.0 * one.shape[0] * inner * other.shape[1], max(1, min(one.shape[0], inner // experts, other.shape[1]))
    flops = 2.0 * math.prod(one.shape) * other.shape[-1]
    return flops, max(1, min(one.shape[-2], inner, other.shape[-1]))


def _attention(name: str, func: Any, args: tuple) -> float:
    """Returns the operations of attention's two products over `[queries, keys]`, halved if causal."""
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    heads = math.prod(query.shape[:-2])
    flops = 2.0 * heads * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(args)
    causal = bool(args[place]) if place < len(args) else False
    return flops * (0.5 if causal else 1.0) * (_ATTENTION_BACKWARD if backward else 1.0)

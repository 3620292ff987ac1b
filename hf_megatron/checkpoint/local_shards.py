"""Local shards of global tensors, and the share of each that a rank writes.

Ranks that hold the same entries (copies over tp, replicas over dp, tied weights at both ends of a pipeline) each write
an equal share of them, so that a save takes the same time on every rank and nothing is gathered.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..compat.torch_dtensor import local_tensor
from ..core.axes import Axes
from ..core.off_stage import local_named_parameters, own_state_dict
from ..core.placement import Placement
from ..core.quantized_weight import QuantizedWeight
from ..data_parallel.buckets import owned_range
from ..data_parallel.fsdp import owned_rows
from ..data_parallel.main_params import MainParam
from ..parallel_state import ParallelState, parallel_state
from .stage_consistency import is_owned, resharded
from .tensor_chunks import LocalChunk, TensorChunk, local_boxes


@dataclass(frozen=True)
class LocalShard:
    """Entries `[start, stop)` of a rank's flattened local shard of a global tensor.

    Attributes:
        axes: the axes of the rank.
        holders: number of ranks that hold exactly these entries; this rank has number `index`.
    """

    shape: tuple[int, ...]
    placement: Placement
    axes: Axes
    start: int
    stop: int
    holders: int
    index: int

    def boxes(self) -> tuple[TensorChunk, ...]:
        """Returns the chunks of the global tensor that the shard covers."""
        return local_boxes(self.shape, self.placement, self.axes, self.start, self.stop)

    def share(self, name: str, data: Tensor) -> LocalChunk | None:
        """Returns the share that this rank writes; `data` holds the entries, `(entries,)` or in their local shape."""
        first, last = owned_range(self.stop - self.start, self.holders, self.index)
        if first == last:
            return None
        boxes = local_boxes(self.shape, self.placement, self.axes, self.start + first, self.start + last)
        return LocalChunk(name, self.shape, boxes, data.detach().reshape(-1)[first:last])


def holding(state: ParallelState, name: str, shape: tuple[int, ...], *, is_moment: bool = False) -> LocalShard:
    """Returns the local shard of a weight or buffer, or of a moment of it; needs no process group.

    Args:
        shape: the global shape, also for a ZeRO-3 weight.
        is_moment (`bool`, defaults to `False`): whether it is sharded optimizer state (ZeRO stages 1 and 2, and
            adapters in stage 3).
    """
    axes, placement = state.axes, state.placement(name)
    local = placement.local_shape(shape, axes)
    start, stop = 0, math.prod(local)
    repeated = placement.repeated_on(axes)
    average = state.average(name)
    shard = f"{average}_shard"
    if state.shards(name):
        row = math.prod(local[1:])
        start, stop = (edge * row for edge in owned_rows(local, axes, average))
        repeated = repeated.without(axes[shard])
    elif is_moment and state.config.zero_stage > 0:
        start, stop = owned_range(stop, axes.size(shard), axes.rank(shard))
        repeated = repeated.without(axes[shard])
    holders, index = repeated.size, repeated.rank(axes.world_rank)
    if state.cut is not None and state.is_tied(name):
        # The ranks of the first stage are numbered before those on the last.
        index += 0 if is_owned(state, name) else holders
        holders *= 2
    return LocalShard(shape, placement, axes, start, stop, holders, index)


def parameter_holding(state: ParallelState | None, name: str, parameter: Tensor) -> LocalShard:
    """Returns the local shard of a parameter of any shape, or of a buffer, which is replicated."""
    shape = tuple(parameter.shape)
    if state is None:
        return LocalShard(shape, Placement(), Axes.from_sizes(0), 0, parameter.numel(), 1, 0)
    return holding(state, name, shape)


def leaf_holding(state: ParallelState | None, leaf: MainParam) -> LocalShard:
    """Returns the local shard of an optimizer's main param, and of moments of its shape."""
    if state is None or not leaf.flat:
        return parameter_holding(state, leaf.name, leaf.parameter)
    return holding(state, leaf.name, tuple(leaf.parameter.shape), is_moment=True)


def full_state_holding(state: ParallelState | None, leaf: MainParam, shape: tuple[int, ...]) -> LocalShard:
    """Returns the share of this rank in a tensor of optimizer state that belongs to a full parameter.

    Args:
        shape: shape of the tensor, which need not be the parameter's.
    """
    if state is None:
        return LocalShard(shape, Placement(), Axes.from_sizes(0), 0, math.prod(shape), 1, 0)
    # Ranks outside of the parameter's axis step on their own copies, and hold the same state.
    axis = state.axes["stage"] if leaf.full is None else state.axes["stage"].without(leaf.full.axis)
    holders, index = axis.size, axis.rank(state.axes.world_rank)
    if state.cut is not None and state.is_tied(leaf.name):
        index += 0 if is_owned(state, leaf.name) else holders
        holders *= 2
    return LocalShard(shape, Placement(), state.axes, 0, math.prod(shape), holders, index)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters of any shape, a tied one under its first name, and the persistent buffers of a model."""
    yield from local_named_parameters(resharded(model))
    persistent = own_state_dict(model, keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def model_pieces(model: Any) -> Iterator[LocalChunk]:
    """Yields this rank's share of a model's weights."""
    state = parallel_state(model)
    for name, tensor in named_tensors(model):
        # Buffers outside the layers exist on every stage; only the owner writes them.
        if state is not None and not is_owned(state, name) and not state.is_tied(name):
            continue
        if state is not None and isinstance(tensor, QuantizedWeight):
            # Codes depend on the layout, dequantized values do not.
            piece = holding(state, name, state.shardings[name].shape).share(name, tensor.dequantized())
        else:
            piece = parameter_holding(state, name, tensor).share(name, local_tensor(tensor).detach())
        if piece is not None:
            yield piece

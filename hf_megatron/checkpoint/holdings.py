"""Which entries of which global tensor a rank holds, and which of them it writes.

Ranks that hold the same entries (copies over tp, replicas over dp, tied weights at both ends of a pipeline) each write
an equal share of them, so that a save takes every rank the same time and nothing is gathered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data_parallel.buckets import owned_range
from ..data_parallel.fully_sharded import owned_rows, tp_local_shape
from ..data_parallel.optimizer import Leaf
from ..parallelize import ParallelState, parallel_state
from ..spec import Placement
from ..upstream import local_tensor
from .pieces import Box, Piece, local_boxes
from .stages import is_owned, is_shared, resharded


@dataclass(frozen=True)
class Holding:
    """The entries `[start, stop)` of a rank's flattened tp shard of a global tensor.

    Attributes:
        holders: how many ranks hold exactly these, of which this rank is number `index`.
    """

    shape: tuple[int, ...]
    placement: Placement
    tp_size: int
    tp_rank: int
    start: int
    stop: int
    holders: int
    index: int

    def boxes(self) -> tuple[Box, ...]:
        """All that is held."""
        return local_boxes(self.shape, self.placement, self.tp_size, self.tp_rank, self.start, self.stop)

    def share(self, name: str, data: Tensor) -> Piece | None:
        """This rank's share of the writing; `data` holds the entries, flat or in their local shape."""
        first, last = owned_range(self.stop - self.start, self.holders, self.index)
        if first == last:
            return None
        start = self.start
        boxes = local_boxes(self.shape, self.placement, self.tp_size, self.tp_rank, start + first, start + last)
        return Piece(name, self.shape, boxes, data.detach().reshape(-1)[first:last])


def _whole(tensor: Tensor) -> Holding:
    return Holding(tuple(tensor.shape), Placement(), 1, 0, 0, tensor.numel(), 1, 0)


def parameter_holding(state: ParallelState | None, name: str, parameter: Tensor) -> Holding:
    """What a rank holds of a parameter, or of a buffer, which every rank has whole."""
    if state is None:
        return _whole(parameter)
    mesh = state.mesh
    placement = _placement(state, name)
    copies, copy = _copies(state, name)
    shape = tuple(parameter.shape)
    replicas, replica = mesh.dp_size, mesh.dp_rank
    start, stop = 0, local_tensor(parameter).numel()
    if state.shards_weights and name in state.claims:
        local = tp_local_shape(parameter, mesh)
        row = int(torch.Size(local[1:]).numel())
        start, stop = (edge * row for edge in owned_rows(local, mesh))
        replicas, replica = mesh.replicate_size, mesh.replicate_rank
    index = replica * copies + copy
    return Holding(shape, placement, mesh.tp_size, mesh.tp_rank, start, stop, replicas * copies, index)


def _placement(state: ParallelState, name: str) -> Placement:
    # Buffers are not claimed: every rank has them whole.
    return state.claims[name].placement if name in state.claims else Placement()


def _copies(state: ParallelState, name: str) -> tuple[int, int]:
    """How many ranks of one dp replica hold the same tp shard, and which of them this rank is."""
    mesh, placement = state.mesh, _placement(state, name)
    copies = mesh.tp_size if placement.dim is None else placement.copies
    copy = mesh.tp_rank % copies
    if is_shared(state, name):
        return 2 * copies, copy if is_owned(state, name) else copies + copy
    return copies, copy


def leaf_holding(state: ParallelState | None, leaf: Leaf) -> Holding:
    """What a rank holds of an optimizer's leaf, and of moments of its shape."""
    whole = parameter_holding(state, leaf.name, leaf.parameter)
    if state is None or not leaf.flat:
        return whole
    mesh = state.mesh
    copies, copy = _copies(state, leaf.name)
    index = mesh.replicate_rank * copies + copy
    return Holding(
        whole.shape,
        whole.placement,
        mesh.tp_size,
        mesh.tp_rank,
        leaf.start,
        leaf.stop,
        mesh.replicate_size * copies,
        index,
    )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, a tied one under its first name, and the buffers that belong to a model's state."""
    yield from resharded(model).named_parameters()
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def model_pieces(model: Any) -> Iterator[Piece]:
    """This rank's share of a model's weights."""
    state = parallel_state(model)
    for name, tensor in named_tensors(model):
        # Buffers outside the layers are on every stage.
        if state is not None and not is_owned(state, name) and not is_shared(state, name):
            continue
        piece = parameter_holding(state, name, tensor).share(name, local_tensor(tensor).detach())
        if piece is not None:
            yield piece

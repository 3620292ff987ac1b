"""Position of a module's output in the batch of a step: its samples, tokens, and features."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..context_parallel.axis import STACK
from ..context_parallel.load_balancing import Interval, cut_intervals
from ..core.communication.collectives import bounds
from ..parallel_state import ParallelState

# Outermost number in a module name: the layer index.
_LAYER = re.compile(r"\.(\d+)(\.|$)")


@dataclass
class PlaceInBatch:
    """Position of the current call's outputs in the batch of the step.

    Attributes:
        first: index of the call's first sample within the step.
        rows: samples of the call on this rank.
        before: samples of the step's earlier calls, on all ranks.
        lengths: sequence lengths of the call's inputs, such as an encoder's and a decoder's.
        done: module name -> number of its calls so far.
        depth: layers passed through.
        microbatch: samples in the current microbatch; the full local batch without a pipeline.
    """

    first: int = 0
    rows: int = 0
    before: int = 0
    lengths: tuple[int, ...] = ()
    done: dict[str, int] = field(default_factory=dict)
    depth: int = 0
    microbatch: int = 0
    _of_ranks: list[int] = field(default_factory=list)

    def begin(self, state: ParallelState | None, args: tuple, kwargs: dict[str, Any]) -> None:
        """Starts a call of the model."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() == 2]
        self.before += sum(self._of_ranks)
        self.rows = tensors[0].shape[0] if tensors else 0
        self.lengths = tuple({value.shape[1]: None for value in tensors})
        self._of_ranks = _samples_per_rank(state, self.rows)
        rank = 0 if state is None else state.mesh.dp_rank
        self.first = self.before + sum(self._of_ranks[:rank])
        self.done, self.depth, self.microbatch = {}, 0, self.rows

    def is_trial_forward(self, state: ParallelState | None) -> bool:
        """Returns whether a pipeline is running a trial forward or a padding microbatch, whose outputs do not count."""
        if state is None or state.pipeline is None:
            return False
        return state.call.span is None or state.call.span.is_repeated

    def place(
        self, state: ParallelState | None, name: str, value: Tensor
    ) -> tuple[tuple[tuple[Interval, ...] | None, ...], int, int] | None:
        """Returns the (sample, token, feature) intervals of a module's output, the index of its call, and the depth.

        `value` is `[samples, tokens, features]` or `[samples * tokens, features]`. Returns `None` if it fits neither.
        """
        if value.dim() == 3:
            self.microbatch = value.shape[0]
        rows = self.microbatch
        if not rows or value.shape[0] % rows or rows > self.rows:
            return None
        part = None if state is None else state.call.span
        tokens = _tokens(state, self.lengths, value.shape[1] if value.dim() == 3 else value.shape[0] // rows)
        if tokens is None:
            return None
        if part is None:
            call = self.done.get(name, 0)
            self.done[name], offset = call + 1, 0
        else:
            call, offset = 0, part.first_token // part.tokens if part.tokens else 0
        # Layers of a later stage keep their indices; modules after the last layer have its depth.
        if (layer := _LAYER.search(name)) is not None:
            self.depth = max(self.depth, 1 + int(layer[1]))
        start = self.first + offset
        return (((start, start + rows),), tokens, None), call, self.depth


def _samples_per_rank(state: ParallelState | None, rows: int) -> list[int]:
    if state is None or state.mesh.dp_size == 1:
        return [rows]
    counts: list[Any] = [None] * state.mesh.dp_size
    dist.all_gather_object(counts, rows, group=state.mesh.dp_group)
    return counts


def _tokens(state: ParallelState | None, lengths: Sequence[int], held: int) -> tuple[Interval, ...] | None:
    """Returns the token intervals with `held` tokens in total; `None` if no sharding of the sequence has as many."""
    for length in lengths:
        for parts in _ways(state, length):
            if sum(stop - start for start, stop in parts) == held:
                return parts
    return None


def _ways(state: ParallelState | None, length: int) -> Iterator[tuple[Interval, ...]]:
    """Yields the token intervals a rank may hold: all, its context-parallel shard, or its sequence-parallel shard."""
    yield ((0, length),)
    if state is None:
        return
    intervals: tuple[Interval, ...] = ((0, length),)
    stack = state.placed.get(STACK)
    if stack is not None and stack.token_layout is not None and stack.token_layout.order.length == length:
        intervals = stack.token_layout.order.parts[stack.groups.rank]
        yield intervals
    if state.config.sequence_parallel and state.axes.size("tp") > 1:
        size = sum(stop - start for start, stop in intervals)
        yield cut_intervals(intervals, *bounds(size, state.axes.size("tp"), state.axes.rank("tp")))

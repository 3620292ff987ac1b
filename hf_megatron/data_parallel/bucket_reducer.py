"""Buckets of one model's gradients, reduced over the data parallel ranks while backward goes on."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.shared import Shared
from ..compat.torch_dtensor import dtensor_from_local, local_tensor
from ..core.communication.bucket_collectives import ReduceScatter, gather_rows, is_pairwise, sum_over
from .buckets import Bucket, Slot
from .sharded_grad import ShardedGrad

# Buckets whose rows exist at a time where they are not kept; more would overlap no better.
_IN_FLIGHT = 2
# Number of a bucket, and of a slot in it.
Place = tuple[int, int]


class BucketReduction(Shared):
    """The buckets of a model's parameters and what of them is reduced.

    Args:
        keep_grad_buffer (`bool`): buckets keep their memory between steps (stages 0 and 1).

    Attributes:
        parameters: those that have a place in the buckets.
        synchronise: whether what backward adds is reduced.
    """

    def __init__(self, *, keep_grad_buffer: bool):
        self.keep_grad_buffer = keep_grad_buffer
        self.synchronise = True
        self.buckets: list[Bucket] = []
        self.parameters: list[nn.Parameter] = []
        self._place_of: dict[int, Place] = {}
        self._proxies: dict[int, ShardedGrad] = {}
        # Buckets whose reduction is under way.
        self._started: list[tuple[Bucket, Callable[[], Tensor]]] = []
        self._next = 0
        # A backward outside `no_sync` has left gradients. All ranks agree on it, whatever each has started already.
        self._pending = False

    def owns(self, parameter: Tensor) -> bool:
        """Tells whether gradients of this parameter, of any shape, are reduced here."""
        return id(parameter) in self._place_of

    def _start_arrived(self) -> None:
        # In the order of buckets on every rank, whatever order backward takes: the collectives have to match.
        while self._next < len(self.buckets):
            following = self.buckets[self._next]
            if len(following.arrived) < len(following.slots):
                break
            self._start(following)

    def _start_all(self) -> None:
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        """Starts the reduction of the next bucket; a parameter without a gradient adds zero."""
        rows = bucket.seal_buffer()
        sharing = bucket.sharing
        if sharing.shard_size > 1:
            pairwise = is_pairwise(sharing.shard_group)
            recv_buffer = bucket.take_inbox() if pairwise else bucket.own_segment(keep=self.keep_grad_buffer)
            work: Callable[[], Tensor] = ReduceScatter(rows, recv_buffer, sharing.shard_group).wait
        else:
            reduction = dist.all_reduce(rows, group=sharing.replicate_group, async_op=True)
            work = partial(_wait_for, reduction, rows)
        self._started.append((bucket, work))
        self._next += 1
        if not self.keep_grad_buffer and len(self._started) > _IN_FLIGHT:
            self._complete(*self._started.pop(0))

    @torch.no_grad()
    def finish(self) -> None:
        """Completes the reduction of everything that backward left; every data parallel rank calls it."""
        if not self._started and not self.waits_for_reduction:
            return
        self._start_all()
        for started in self._started:
            self._complete(*started)
        self._started.clear()
        self._find_shared_uses()
        self._next = 0
        self._pending = False

    @torch.no_grad()
    def _complete(self, bucket: Bucket, work: Callable[[], Tensor]) -> None:
        reduced = work()
        if bucket.sharing.shard_size > 1:
            sum_over(reduced, bucket.sharing.replicate_group)
        bucket.take_in(reduced, keep=self.keep_grad_buffer)

    def _find_shared_uses(self) -> None:
        """Shows gradients of parameters that this rank has not used and others have: it asks once for all buckets."""
        waiting = [bucket for bucket in self.buckets if bucket.flags is not None]
        if not waiting:
            return
        counts = torch.cat([bucket.flags for bucket in waiting if bucket.flags is not None]).tolist()
        for bucket in waiting:
            size = len(bucket.slots)
            # What a loop has put into `.grad` waits there until it is taken over.
            found = bucket.take_flags(counts[:size])
            self._show(bucket, [index for index in found if bucket.slots[index].parameter.grad is None])
            counts = counts[size:]

    def _show(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Makes gradients seen in `.grad` that autograd has not left there on this rank."""
        for index in indices:
            parameter = bucket.slots[index].parameter
            parameter.grad = self._proxies[id(parameter)]

    @torch.no_grad()
    def reduce(self) -> None:
        self._pending = True
        self._start_all()

    def complete(self) -> None:
        if self._pending:
            self.finish()

    @property
    def waits_for_reduction(self) -> bool:
        return any(bucket.written for bucket in self.buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backwards inside only add up gradients; the next backward outside reduces the sum."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    # Reading

    def memory(self) -> dict[str, list[Tensor]]:
        """Lists what holds gradients and what arrives of them, of any shape; some share their memory."""
        sums = [tensor for bucket in self.buckets for tensor in (bucket.rows, bucket.shard) if tensor is not None]
        return {
            "gradients": sums,
            "recv_buffer": [bucket.recv_buffer for bucket in self.buckets if bucket.recv_buffer is not None],
        }

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns the reduced gradient `[entries]` of what this rank owns of a parameter; `finish()` comes before."""
        number, index = self._place_of[id(parameter)]
        bucket = self.buckets[number]
        if bucket.shard is None or index not in bucket.used:
            return None
        return bucket.slots[index].own_columns(bucket.shard, bucket.sharing.shard_size, bucket.sharing.shard_rank)

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the reduced gradient of any shape, its parameter's, on every rank; for tests and debugging."""
        number, index = self._place_of[id(parameter)]
        bucket = self.buckets[number]
        if bucket.shard is None or index not in bucket.used:
            return None
        slot = bucket.slots[index]
        columns = bucket.shard[slot.start : slot.start + slot.width].contiguous()
        rows = gather_rows(columns, bucket.sharing.shard_group)
        local = torch.empty(local_tensor(parameter).shape, dtype=bucket.dtype, device=bucket.device)
        Slot(parameter, 0, slot.width, slot.entries).collect_from(rows, local)
        return dtensor_from_local(local, parameter) if isinstance(parameter, DTensor) else local


def _wait_for(work: Any, rows: Tensor) -> Tensor:
    work.wait()
    return rows[0]

"""Gradients of the data parallel ranks: averaged in buckets while backward goes on, each rank keeping what it owns.

Megatron's distributed optimizer (`megatron/core/distributed/param_and_grad_buffer.py`) without its buffers: parameters
stay where they are, so that freezing, copying, saving and moving a model work as always. A gradient leaves `.grad` for
its bucket as soon as autograd has added it up; `gradient(parameter)` is the reduced part that this rank owns.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..communication.flat_rows import ReduceScatter, gather_rows, sum_over
from ..errors import UnsupportedError
from ..patch_ledger import Shared
from ..upstream import dtensor_from_local, gradient_hooks, local_tensor
from .buckets import Bucket, Slot, Sum, make_buckets
from .reduction_groups import Sharing

_MIB = 2**20
# Buckets whose rows exist at a time where they are not kept; more would overlap no better.
_IN_FLIGHT = 2


class GradientReducer(Shared):
    """Averages the gradients of a model's trainable parameters over the data parallel ranks.

    Args:
        parameters: all of a model's, in its order.
        name_of (`Callable`): parameter -> its name, for errors.
        sharing_of (`Callable`): parameter -> the ranks that average its gradient.
        bucket_size (`int`): MiB of gradient per bucket.
        main_gradients (`bool`): gradients of half-precision parameters are added up and reduced in fp32.
        keep_rows (`bool`): buckets keep their memory between steps (stages 0 and 1).

    Attributes:
        parameters: those that were trainable when the last forward began.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        name_of: Callable[[Tensor], str],
        sharing_of: Callable[[Tensor], Sharing],
        *,
        bucket_size: int,
        main_gradients: bool,
        keep_rows: bool,
    ):
        self._name_of, self.sharing_of = name_of, sharing_of
        self.bucket_size, self.main_gradients, self.keep_rows = bucket_size, main_gradients, keep_rows
        self.synchronise = True
        self.buckets: list[Bucket] = []
        self._place_of: dict[int, tuple[int, int]] = {}
        self._hooks: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        # Buckets whose reduction is under way.
        self._started: list[tuple[Bucket, Callable[[], Tensor]]] = []
        self._next = 0
        # A backward outside `no_sync` has left gradients. All ranks agree on it, whatever each has started already.
        self._pending = False
        self._held: set[int] = set()
        self._build(parameters)

    def owns(self, parameter: Tensor) -> bool:
        """Tells whether gradients of this parameter, of any shape, are reduced here."""
        return id(parameter) in self._place_of

    # Backward

    def _build(self, parameters: Iterable[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # Backward reaches the last layers first.
        self.buckets = make_buckets(
            reversed(self.parameters),
            self.sharing_of,
            self.bucket_size * _MIB,
            torch.float32 if self.main_gradients else None,
        )
        self._place_of = {
            id(slot.parameter): (number, index)
            for number, bucket in enumerate(self.buckets)
            for index, slot in enumerate(bucket.slots)
        }
        # Autograd keeps these hooks where the cyclic collector does not look: they must not keep the model.
        reducer = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_arrive, reducer, self._place_of[id(parameter)]))
            for parameter in self.parameters
        ]

    def refresh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes note of parameters that were frozen, unfrozen or replaced since."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if len(trainable) == len(self.parameters) and all(map(operator.is_, trainable, self.parameters)):
            return
        if any(bucket.written for bucket in self.buckets):
            raise UnsupportedError(
                "Parameters were frozen, unfrozen or replaced between the microbatches of a step: do so after "
                "optimizer.step() and zero_grad()."
            )
        self.discard()
        self._build(trainable)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepares for a forward that records gradients of these parameters, all of the model's."""
        self.refresh(parameters)
        self.complete()
        for bucket in self.buckets:
            bucket.arrived.clear()

    def _arrive(self, place: tuple[int, int], parameter: Tensor) -> None:
        """Takes in a parameter's gradient, which autograd has added up."""
        # A pipeline's loss leads to every parameter, and brings its gradients by another way.
        if id(parameter) in self._held or (gradient := parameter.grad) is None:
            return
        bucket, index = self.buckets[place[0]], place[1]
        if place[0] < self._next:
            raise UnsupportedError(
                f"{self._name_of(parameter)} received another gradient after it was reduced. Put every backward but "
                "the last of a step inside `with model.no_sync():`; gradient checkpointing needs use_reentrant=False."
            )
        # The ranks' sum of gradients over dp_size is their average.
        factor, add = 1 / bucket.sharing.divisor, index in bucket.written
        bucket.slots[index].scatter_into(bucket.open_rows(), local_tensor(gradient), factor=factor, add=add)
        bucket.written.add(index)
        parameter.grad = None
        if not self.synchronise:
            return
        self._pending = True
        bucket.arrived.add(index)
        # In the order of buckets on every rank, whatever order backward takes: the collectives have to match.
        while self._next < len(self.buckets):
            following = self.buckets[self._next]
            if len(following.arrived) < len(following.slots):
                break
            self._start(following)

    def _start(self, bucket: Bucket) -> None:
        """Starts the reduction of the next bucket; a parameter without a gradient adds zero."""
        rows = bucket.close_rows()
        sharing = bucket.sharing
        if sharing.shard_size > 1:
            work: Callable[[], Tensor] = ReduceScatter(rows, bucket.take_inbox(), sharing.shard_group).wait
        else:
            reduction = dist.all_reduce(rows, group=sharing.replicate_group, async_op=True)
            work = partial(_wait_for, reduction, rows)
        self._started.append((bucket, work))
        self._next += 1
        if not self.keep_rows and len(self._started) > _IN_FLIGHT:
            self._complete(*self._started.pop(0))

    @torch.no_grad()
    def finish(self) -> None:
        """Completes the reduction of everything that backward left; every data parallel rank calls it."""
        if not any(bucket.written for bucket in self.buckets):
            return
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        for started in self._started:
            self._complete(*started)
        self._started.clear()
        self._next = 0
        self._pending = False

    @torch.no_grad()
    def _complete(self, bucket: Bucket, work: Callable[[], Tensor]) -> None:
        reduced = work()
        if bucket.sharing.shard_size > 1:
            sum_over(reduced, bucket.sharing.replicate_group)
        bucket.take_in(reduced, keep=self.keep_rows)

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forgets the gradients of these parameters, by default of all, as `zero_grad()` does."""
        if self._pending:
            self.finish()
        if parameters is None:
            for bucket in self.buckets:
                bucket.discard(keep=self.keep_rows)
        else:
            slots: dict[int, set[int]] = {}
            for parameter in parameters:
                if self.owns(parameter):
                    number, index = self._place_of[id(parameter)]
                    slots.setdefault(number, set()).add(index)
            for number, indices in slots.items():
                self.buckets[number].discard_slots(indices, keep=self.keep_rows)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backwards inside only add up gradients; the next backward outside reduces the sum."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    # What `GradientStore` asks for besides, and describes

    @property
    def is_empty(self) -> bool:
        return not any(bucket.written or bucket.shard is not None for bucket in self.buckets)

    @property
    def waits_for_reduction(self) -> bool:
        return any(bucket.written for bucket in self.buckets)

    @property
    def is_watched(self) -> bool:
        # One of each parameter's hooks is the reducer's.
        return any(gradient_hooks(parameter) > 1 for parameter in self.parameters)

    def put_aside(self) -> list[Sum] | None:
        # An empty sum leaves its memory to the next one.
        return None if self.is_empty else [bucket.exchange(Sum()) for bucket in self.buckets]

    def take_back(self, before: list[Sum] | None) -> list[Sum]:
        if before is None:
            before = [Sum() for _ in self.buckets]
        return [bucket.exchange(sum_) for bucket, sum_ in zip(self.buckets, before, strict=True)]

    def found(self, sums: list[Sum]) -> list[nn.Parameter]:
        return self.parameters

    @torch.no_grad()
    def hand_over(self, sums: list[Sum], factor: float, *, keep: bool) -> list[Tensor | None]:
        self.complete()
        for bucket, sum_ in zip(self.buckets, sums, strict=True):
            bucket.add(sum_.copy() if keep else sum_, factor)
        return [None] * len(self.parameters)

    @torch.no_grad()
    def reduce(self) -> None:
        self._pending = True
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])

    def complete(self) -> None:
        if self._pending:
            self.finish()

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._arrive(self._place_of[id(parameter)], parameter)

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        self._held = {id(parameter) for parameter in parameters}
        try:
            yield
        finally:
            self._held = set()
            self.take(parameters)

    # Reading

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


def _arrive(reducer: "weakref.ref[GradientReducer]", place: tuple[int, int], parameter: Tensor) -> None:
    if (alive := reducer()) is not None:
        alive._arrive(place, parameter)


def _wait_for(work: Any, rows: Tensor) -> Tensor:
    work.wait()
    return rows[0]

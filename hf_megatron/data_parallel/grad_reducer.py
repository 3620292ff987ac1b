"""Bucketed gradient reducer: averages gradients over data-parallel ranks while backward is still running.

It does what Megatron-Core's distributed optimizer does (`megatron/core/distributed/param_and_grad_buffer.py`), without
moving parameters into a buffer, so that freezing, copying, saving and moving a model work as usual. As soon as autograd
has accumulated the gradient of a parameter, it is copied from `.grad` into its bucket, and `.grad` holds a
`ShardedGrad` instead. A bucket whose gradients are complete is reduce-scattered; `gradient(parameter)` is the reduced
shard that this rank owns. Changes that a training loop makes to `.grad` are read back before the next forward and step
(`grad_access.py`).
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

from ..compat.shared import Shared
from ..compat.torch_autograd import gradient_hooks, run_after_backward
from ..compat.torch_dtensor import dtensor_from_local, local_tensor
from ..core.communication.bucket_collectives import ReduceScatter, gather_rows, is_pairwise, sum_over
from ..errors import UnsupportedError
from .bucket_assignment import make_buckets
from .buckets import Bucket, GradBuffer, GradScale
from .grad_access import GradAccess
from .grad_sync_groups import GradSyncGroup

_MIB = 2**20
# Without persistent buffers (ZeRO stages 2 and 3) at most this many reductions run at once, which limits memory; more
# would not overlap better.
_MAX_IN_FLIGHT = 2
# Attribute of parameters that carry a hook of the reducer.
_HOOKED = "_hf_megatron_hooked"
# A bucket, its index, and the index of a slot in it.
Place = tuple[Bucket, int, int]


class GradientReducer(Shared):
    """Averages the gradients of a model's trainable parameters over the data-parallel ranks; a `GradStore`.

    Args:
        parameters: all parameters of the model, in its order.
        name_of (`Callable`): parameter -> its name, for error messages.
        sharing_of (`Callable`): parameter -> the ranks that average its gradient.
        bucket_size (`int`, *optional*): MiB of gradient per bucket; by default chosen from dtype and ranks
            (`bucket_assignment.default_capacity`, in bytes).
        main_gradients (`bool`): whether gradients of half-precision parameters are accumulated and reduced in fp32.
        keep_grad_buffer (`bool`): whether buckets keep their memory between steps (ZeRO stages 0 and 1).

    Attributes:
        access (`GradAccess`): what `.grad` shows of the reduced gradients.
        parameters: those that were trainable, or had a gradient, when the last forward began.
        synchronize: whether gradients that a backward accumulates are reduced.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        name_of: Callable[[Tensor], str],
        sharing_of: Callable[[Tensor], GradSyncGroup],
        *,
        bucket_size: int | None,
        main_gradients: bool,
        keep_grad_buffer: bool,
    ):
        self.name_of, self.sharing_of = name_of, sharing_of
        self.bucket_size, self.main_gradients = bucket_size, main_gradients
        self.keep_grad_buffer = keep_grad_buffer
        self.synchronize = True
        self.access = GradAccess(self)
        self.buckets: list[Bucket] = []
        self.parameters: list[nn.Parameter] = []
        # Identity of a parameter -> where its gradient is accumulated.
        self.places: dict[int, Place] = {}
        self._kinds: list[tuple[torch.dtype, bool]] = []
        self._hooks: list[Any] = []
        # Reductions in flight, in the order of buckets, and the index of the bucket to start next.
        self._started: list[tuple[Bucket, Callable[[], Tensor]]] = []
        self._next = 0
        # True if a backward outside `no_sync` left gradients. It is identical on all ranks, however many buckets each
        # of them has started.
        self._pending = False
        # True once an end-of-backward callback is queued.
        self._awaits_end = False
        self._build(parameters)

    # Buckets

    def _build(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assigns the trainable parameters to buckets and installs their hooks."""
        for hook in self._hooks:
            hook.remove()
        self.parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
        # Backward reaches the last layers first. Frozen parameters come last: they wait for the end of the step.
        expected = [parameter for parameter in reversed(self.parameters) if parameter.requires_grad]
        expected += [parameter for parameter in self.parameters if not parameter.requires_grad]
        self.buckets = make_buckets(
            expected,
            self.sharing_of,
            None if self.bucket_size is None else self.bucket_size * _MIB,
            torch.float32 if self.main_gradients else None,
        )
        for bucket in self.buckets:
            # The reduction sums, so each rank scales by 1 / ranks to get the average.
            bucket.scale = GradScale(1 / bucket.sharing.divisor, bucket.device)
        self.places = {
            key: (bucket, bucket_idx, slot_idx)
            for bucket_idx, bucket in enumerate(self.buckets)
            for slot_idx, key in enumerate(bucket.keys)
        }
        self.access.make_proxies(self.parameters)
        # Autograd keeps these hooks where the garbage collector does not look, so they hold the reducer weakly.
        reducer = weakref.ref(self)
        for parameter in self.parameters:
            setattr(parameter, _HOOKED, True)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_on_accumulated, reducer))
            for parameter in self.parameters
            if parameter.requires_grad
        ]
        self._kinds = _kinds(self.parameters)

    def refresh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Rebuilds the buckets if parameters were frozen, unfrozen, replaced or moved; gradients are kept."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None]
        if _same(wanted, self.parameters) and self._kinds == _kinds(wanted):
            return
        self.finish()
        # This rank's shards, `[entries]` each: the range that it owns of a parameter is the same in the new buckets.
        kept = {
            id(parameter): gradient.clone()
            for parameter in self.parameters
            if (gradient := self.gradient(parameter)) is not None
        }
        self._build(wanted)
        for parameter in self.parameters:
            if id(parameter) in kept and self.access.shows_sharded(parameter):
                self.access.open_owned(id(parameter)).copy_(kept[id(parameter)])
        self.access.sync_user_edits()

    def owns(self, parameter: Tensor) -> bool:
        """Returns whether gradients of this parameter, of any shape, are reduced here."""
        return id(parameter) in self.places

    def slot(self, key: int) -> tuple[Bucket, int]:
        """Returns the bucket of the parameter with identity `key`, and the index of its slot."""
        bucket, _, slot_idx = self.places[key]
        return bucket, slot_idx

    # Forward and backward

    def begin_forward(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepares for a forward that records gradients of these parameters, all of the model's."""
        self.complete()
        self.access.sync_user_edits()
        self.refresh(parameters)
        self._awaits_end = False
        for bucket in self.buckets:
            bucket.arrived.clear()

    def begin_backward(self) -> None:
        """Takes the proxies out of `.grad` until the backward ends: autograd writes into an empty `.grad` faster."""
        if not self._awaits_end:
            self._awaits_end = True
            run_after_backward(self._reduce_unused)
        if self.access.is_detached or (self._pending and any(bucket.written for bucket in self.buckets)):
            return
        self.access.sync_user_edits()
        if (parameter := self.access.find_held_buffer()) is not None:
            raise UnsupportedError(
                f"{self.name_of(parameter)}.grad was assigned a tensor that the training loop still holds, and a "
                "backward would add to another one: gradients are sharded over data-parallel ranks. Assign a clone() "
                "and read `.grad` after backward, or set it to None before backward."
            )
        self.access.detach_for_backward()

    def _reduce_unused(self) -> None:
        """Reduces buckets that this rank's backward did not complete; other ranks may have gradients in them."""
        self._awaits_end = False
        if self._pending and self._next < len(self.buckets):
            self.finish()

    def accumulate(self, parameter: Tensor) -> None:
        """Copies a parameter's gradient, which autograd has accumulated, into its bucket."""
        # Runs once per parameter in each backward: it makes few Python calls.
        access = self.access
        bucket, bucket_idx, slot_idx = self.places[id(parameter)]
        if (
            self._pending
            and (slot_idx in bucket.arrived or bucket_idx < self._next)
            and not access.is_held_back(parameter)
        ):
            # A second backward without a forward in between: this bucket's reduction has started already.
            if access.in_schedule:
                # Data-parallel ranks may have different numbers of microbatches with a gradient: one would wait.
                raise UnsupportedError(
                    f"{self.name_of(parameter)} received another gradient after it was reduced, in a pipeline's "
                    "schedule. Modules that a stage calls twice need gradient checkpointing with use_reentrant=False."
                )
            self.finish()
        gradient = access.take_accumulated(parameter, bucket, slot_idx)
        # Under a pipeline, gradients are added by `flush()`; this hook then has none to take in.
        if gradient is None:
            return
        if gradient.requires_grad:
            raise UnsupportedError(
                f"backward(create_graph=True) is not supported with dp_size > 1 or fp32 main params: the gradient of "
                f"{self.name_of(parameter)} is reduced without its graph."
            )
        columns = bucket.columns
        if columns is None or bucket.in_rows:
            columns = bucket.open_columns()
        local = gradient if type(gradient) is Tensor else local_tensor(gradient)
        add = slot_idx in bucket.written
        bucket.slots[slot_idx].scatter_into(columns[slot_idx], local, scale=bucket.scale, add=add)
        bucket.written.add(slot_idx)
        if not self.synchronize:
            return
        self._pending = True
        bucket.arrived.add(slot_idx)
        if len(bucket.arrived) == len(bucket.slots):
            self._start_complete()

    # Reduction

    def _start_complete(self) -> None:
        """Starts the reduction of complete buckets."""
        # Collectives have to match across ranks: buckets start in their order, whatever order backward takes.
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if len(bucket.arrived) < len(bucket.slots):
                break
            self._start(bucket)

    def _start_all(self) -> None:
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])

    def _start(self, bucket: Bucket) -> None:
        """Starts the reduction of the next bucket; a parameter without a gradient contributes zeros."""
        # [ranks, width + parameters]: row r is what rank r will own; the last columns count gradients.
        rows = bucket.seal_buffer()
        sharing = bucket.sharing
        if sharing.shard_size > 1:
            pairwise = is_pairwise(sharing.shard_group)
            recv_buffer = bucket.take_recv_buffer() if pairwise else bucket.own_segment(keep=self.keep_grad_buffer)
            work: Callable[[], Tensor] = ReduceScatter(rows, recv_buffer, sharing.shard_group).wait
        elif sharing.replicate_size > 1:
            # One shard: the buffer has one row, which is all-reduced over the replicas in place.
            reduction = dist.all_reduce(rows, group=sharing.replicate_group, async_op=True)
            work = partial(_wait_for, reduction, rows)
        else:
            # One rank, which accumulates gradients in fp32.
            work = partial(rows.__getitem__, 0)
        self._started.append((bucket, work))
        self._next += 1
        if not self.keep_grad_buffer and len(self._started) > _MAX_IN_FLIGHT:
            self._complete(*self._started.pop(0))

    @torch.no_grad()
    def _complete(self, bucket: Bucket, work: Callable[[], Tensor]) -> None:
        """Waits for a bucket's reduction and adds its result to the shard."""
        reduced = work()
        if bucket.sharing.shard_size > 1:
            # Hybrid sharding: the reduce-scatter ran inside a shard group; its copies are summed here.
            sum_over(reduced, bucket.sharing.replicate_group)
        bucket.take_in(reduced, keep=self.keep_grad_buffer)

    @torch.no_grad()
    def finish(self) -> None:
        """Completes the reduction of all gradients that backward left; collective over the data-parallel ranks."""
        if not self._started and not self.waits_for_reduction:
            return
        self._start_all()
        for started in self._started:
            self._complete(*started)
        self._started.clear()
        self._show_used_elsewhere()
        self._next = 0
        self._pending = False

    def _show_used_elsewhere(self) -> None:
        """Shows gradients of parameters that only other ranks used; reads the flags of all buckets at once."""
        waiting = [bucket for bucket in self.buckets if bucket.flags is not None]
        if not waiting:
            return
        counts = torch.cat([bucket.flags for bucket in waiting if bucket.flags is not None]).tolist()
        for bucket in waiting:
            size = len(bucket.slots)
            newly_used = bucket.take_flags(counts[:size])
            # A gradient that the loop put into `.grad` stays there until it is read back.
            self.access.show(bucket, [index for index in newly_used if bucket.slots[index].parameter.grad is None])
            counts = counts[size:]

    def finalize(self) -> None:
        """Prepares `gradient` for a step: reads edits of `.grad` back and completes reductions; collective."""
        self.access.sync_user_edits()
        self.finish()

    @torch.no_grad()
    def reduce(self) -> None:
        """Starts the reduction of all gradients that are not reduced yet; collective."""
        self._pending = True
        self._start_all()

    def complete(self) -> None:
        """Completes the reduction of a backward outside `no_sync`; collective."""
        if self._pending:
            self.finish()

    @property
    def waits_for_reduction(self) -> bool:
        """Whether gradients were accumulated that are not reduced."""
        return any(bucket.written for bucket in self.buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients of backwards inside; the next backward outside reduces the sum."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    # Reduced gradients

    def memory(self) -> dict[str, list[Tensor]]:
        """Returns the tensors, of any shape, that hold gradients or receive them; some share their memory."""
        sums = [tensor for bucket in self.buckets for tensor in (bucket.rows, bucket.shard) if tensor is not None]
        return {
            "gradients": sums,
            "recv_buffer": [bucket.recv_buffer for bucket in self.buckets if bucket.recv_buffer is not None],
        }

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns this rank's shard `[entries]` of a parameter's reduced gradient; call `finish()` first."""
        bucket, slot_idx = self.slot(id(parameter))
        if bucket.shard is None or slot_idx not in bucket.used:
            return None
        return bucket.slots[slot_idx].own_columns(bucket.shard, bucket.sharing.shard_size, bucket.sharing.shard_rank)

    def list_gradients(self) -> dict[int, Tensor]:
        """Returns what `gradient` returns by identity of each parameter with a gradient; call `finish()` first."""
        gradients: dict[int, Tensor] = {}
        for bucket in self.buckets:
            if bucket.shard is None:
                continue
            owned = zip(bucket.keys, bucket.list_owned(bucket.shard), strict=True)
            if len(bucket.used) == len(bucket.slots):
                gradients.update(owned)
            else:
                gradients.update(pair for index, pair in enumerate(owned) if index in bucket.used)
        return gradients

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the reduced gradient in its parameter's shape, on every rank; collective."""
        bucket, slot_idx = self.slot(id(parameter))
        if bucket.shard is None or slot_idx not in bucket.used:
            return None
        slot = bucket.slots[slot_idx]
        # [width] per rank -> [ranks, width] -> the local shape of the parameter.
        columns = bucket.shard[slot.start : slot.start + slot.width].contiguous()
        rows = gather_rows(columns, bucket.sharing.shard_group)
        local = torch.empty(local_tensor(parameter).shape, dtype=bucket.dtype, device=bucket.device)
        for received, part in zip(slot.cut_columns(rows), slot.cut(local.view(-1)), strict=True):
            part.copy_(received)
        return dtensor_from_local(local, parameter) if isinstance(parameter, DTensor) else local

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Discards the gradients of these parameters, by default of all, as `zero_grad()` does."""
        self.complete()
        if parameters is None:
            for bucket in self.buckets:
                bucket.discard(keep=self.keep_grad_buffer)
            parameters = self.parameters
        else:
            parameters = list(parameters)
            slots: dict[int, set[int]] = {}
            for parameter in parameters:
                if (place := self.places.get(id(parameter))) is not None:
                    _, bucket_idx, slot_idx = place
                    slots.setdefault(bucket_idx, set()).add(slot_idx)
            for bucket_idx, indices in slots.items():
                self.buckets[bucket_idx].discard_slots(indices, keep=self.keep_grad_buffer)
        self.access.clear(parameters)

    # The rest of `GradStore`: a pipeline keeps the gradients of a schedule apart until their scale is known.

    @property
    def is_empty(self) -> bool:
        """Whether no gradient was accumulated since the last `zero_grad()`."""
        self.access.sync_user_edits()
        return not any(bucket.written or bucket.shard is not None for bucket in self.buckets)

    @property
    def has_user_hooks(self) -> bool:
        """Whether gradients have hooks besides the reducer's one per parameter."""
        return any(gradient_hooks(parameter) > 1 for parameter in self.parameters)

    def stash(self) -> list[GradBuffer] | None:
        """Takes the accumulated gradients out; returns `None` if there are none, and the buckets keep their buffers."""
        # One `GradBuffer` per bucket: the bucket continues with empty ones, and nothing is copied.
        stashed = None if self.is_empty else [bucket.exchange(GradBuffer()) for bucket in self.buckets]
        self.access.hide()
        return stashed

    def unstash(self, stashed: list[GradBuffer] | None) -> list[GradBuffer]:
        """Restores stashed gradients; returns those that were accumulated meanwhile."""
        if stashed is None:
            stashed = [GradBuffer() for _ in self.buckets]
        present = [bucket.exchange(buffer) for bucket, buffer in zip(self.buckets, stashed, strict=True)]
        self.access.hide()
        for bucket in self.buckets:
            self.access.show(bucket, bucket.written | bucket.used)
        return present

    def parameters_with_grad(self, buffers: list[GradBuffer]) -> list[nn.Parameter]:
        """Returns the parameters that buffers may have gradients of."""
        return self.parameters

    @torch.no_grad()
    def flush(self, buffers: list[GradBuffer], factor: float | Tensor, *, keep: bool) -> list[Tensor | None]:
        """Adds `factor` times these gradients to the accumulated ones; autograd has nothing left to add."""
        self.complete()
        # Between a pipeline's forward and its backward the loop may have changed `.grad`.
        self.access.sync_user_edits()
        for bucket, buffer in zip(self.buckets, buffers, strict=True):
            added = buffer.written | buffer.used
            bucket.add(buffer.copy() if keep else buffer, factor)
            self.access.show(bucket, added)
        return [None] * len(self.parameters)

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes in gradients that were added to `.grad` without the parameters' hooks."""
        for parameter in parameters:
            if self.access.has_accumulated(parameter):
                self.accumulate(parameter)

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Leaves gradients of these parameters in `.grad` inside, and takes them in afterwards."""
        try:
            with self.access.hold(parameters):
                yield
        finally:
            self.collect(parameters)


def _kinds(parameters: Iterable[Tensor]) -> list[tuple[torch.dtype, bool]]:
    """Returns what changes when parameters are cast or moved; `Module.to` may swap their tensors and lose the mark."""
    return [(parameter.dtype, _HOOKED in vars(parameter)) for parameter in parameters]


def _same(parameters: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return len(parameters) == len(others) and all(map(operator.is_, parameters, others))


def _on_accumulated(reducer: "weakref.ref[GradientReducer]", parameter: Tensor) -> None:
    if (alive := reducer()) is not None:
        alive.accumulate(parameter)


def _wait_for(work: Any, rows: Tensor) -> Tensor:
    work.wait()
    return rows[0]

"""Gradients of the data parallel ranks: averaged in buckets while backward goes on, each rank keeping what it owns.

Megatron's distributed optimizer (`megatron/core/distributed/param_and_grad_buffer.py`) without its buffers: parameters
stay where they are, so that freezing, copying, saving and moving a model work as always. A gradient leaves `.grad` for
its bucket as soon as autograd has added it up, and a `ReducedGradient` stands there in its place; `gradient(parameter)`
is the reduced part that this rank owns. What a loop does to `.grad` is taken over before the next forward and step.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..upstream import at_end_of_backward, gradient_hooks, local_tensor, restore_hooks
from .bucket_reduction import Place
from .buckets import Sum, make_buckets
from .reduced_gradient import ReducedGradient, stand_in
from .reduction_groups import Sharing
from .served_gradients import ServedGradients

_MIB = 2**20
# On parameters as long as their hooks are called.
_HOOKED = "_hf_megatron_hooked"


class GradientReducer(ServedGradients):
    """Averages the gradients of a model's trainable parameters over the data parallel ranks.

    Args:
        parameters: all of a model's, in its order.
        name_of (`Callable`): parameter -> its name, for errors.
        sharing_of (`Callable`): parameter -> the ranks that average its gradient.
        bucket_size (`int`): MiB of gradient per bucket.
        main_gradients (`bool`): gradients of half-precision parameters are added up and reduced in fp32.
        keep_rows (`bool`): buckets keep their memory between steps (stages 0 and 1).

    Attributes:
        parameters: those that were trainable, or had a gradient, when the last forward began.
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
        super().__init__(keep_rows=keep_rows)
        self._name_of, self.sharing_of = name_of, sharing_of
        self.bucket_size, self.main_gradients = bucket_size, main_gradients
        self._hooks: list[Any] = []
        self._held: set[int] = set()
        # Parameters whose stand-in is not in `.grad` although they have a gradient, while a backward runs.
        self._absent: set[int] = set()
        # Whether the end of the backward under way is waited for.
        self._ends = False
        self._build(parameters)

    # Between forwards

    def _build(self, parameters: Iterable[nn.Parameter]) -> None:
        for hook in self._hooks:
            hook.remove()
        self.parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
        # Backward reaches the last layers first; frozen parameters wait for the end of the step.
        expected = [parameter for parameter in reversed(self.parameters) if parameter.requires_grad]
        expected += [parameter for parameter in self.parameters if not parameter.requires_grad]
        self.buckets = make_buckets(
            expected,
            self.sharing_of,
            self.bucket_size * _MIB,
            torch.float32 if self.main_gradients else None,
        )
        self._place_of = {
            id(slot.parameter): (number, index)
            for number, bucket in enumerate(self.buckets)
            for index, slot in enumerate(bucket.slots)
        }
        self._stand_ins = {id(parameter): stand_in(parameter, self) for parameter in self.parameters}
        # Autograd keeps these hooks where the cyclic collector does not look: they must not keep the model.
        reducer = weakref.ref(self)
        for parameter in self.parameters:
            setattr(parameter, _HOOKED, True)
            restore_hooks(parameter)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_arrive, reducer, self._place_of[id(parameter)]))
            for parameter in self.parameters
            if parameter.requires_grad
        ]
        self._kinds = [_kind(parameter) for parameter in self.parameters]

    def refresh(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes note of parameters that were frozen, unfrozen, replaced or moved since; their gradients stay."""
        wanted = [parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None]
        if _same(wanted, self.parameters) and self._kinds == [_kind(parameter) for parameter in wanted]:
            return
        self.finish()
        kept = {
            id(parameter): gradient.clone()
            for parameter in self.parameters
            if (gradient := self.gradient(parameter)) is not None
        }
        self._build(wanted)
        for parameter in self.parameters:
            if id(parameter) in kept and isinstance(parameter.grad, ReducedGradient):
                self._own_columns(self._place_of[id(parameter)]).copy_(kept[id(parameter)])
        self.take_edits()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Prepares for a forward that records gradients of these parameters, all of the model's."""
        self.complete()
        self.take_edits()
        self.refresh(parameters)
        self._ends = False
        for bucket in self.buckets:
            bucket.arrived.clear()

    # Backward

    def begin_backward(self) -> None:
        """Takes stand-ins out of `.grad` until the backward under way ends: autograd leaves gradients there faster."""
        if not self._ends:
            self._ends = True
            at_end_of_backward(self._find_unused)
        if self._absent or any(bucket.written for bucket in self.buckets) and self._pending:
            return
        self.take_edits()
        for bucket in self.buckets:
            for index in bucket.written | bucket.used:
                parameter = bucket.slots[index].parameter
                parameter.grad = None
                self._absent.add(id(parameter))
        if self._absent:
            at_end_of_backward(self._end_backward)

    def _find_unused(self) -> None:
        """Reduces what this rank's backward has not reached: others may have, and a loop sees it in `.grad` then."""
        self._ends = False
        if self._pending and self._next < len(self.buckets):
            self.finish()

    def _end_backward(self) -> None:
        for key in self._absent:
            self.parameter(key).grad = self._stand_ins[key]
        self._absent.clear()

    def _arrive(self, place: Place, parameter: Tensor) -> None:
        """Takes in a parameter's gradient, which autograd has added up."""
        standing = self._stand_ins[id(parameter)]
        has_none = parameter.grad is None or (parameter.grad is standing and standing.part is None)
        # A pipeline's loss leads to every parameter, and brings its gradients by another way.
        if id(parameter) in self._held or has_none:
            return
        bucket, index = self.buckets[place[0]], place[1]
        if self._pending and (index in bucket.arrived or place[0] < self._next):
            # Another backward without a forward before it.
            if self.in_schedule:
                # Not every dp rank has as many microbatches with a gradient: one would wait for the others.
                raise UnsupportedError(
                    f"{self._name_of(parameter)} received another gradient after it was reduced, in a pipeline's "
                    "schedule. Modules that a stage calls twice need gradient checkpointing with use_reentrant=False."
                )
            self.finish()
        gradient = standing.take_part()
        # `_renew` counts who refers to it.
        del standing
        if gradient is None:
            gradient = parameter.grad
            assert gradient is not None
            if id(parameter) in self._absent:
                self._absent.remove(id(parameter))
            else:
                if index in bucket.written or index in bucket.used:
                    # Somebody took the earlier one out of `.grad` since the forward began.
                    bucket.discard_slots({index}, keep=self.keep_rows)
                self._renew(parameter)
        if gradient.requires_grad:
            raise UnsupportedError(
                f"backward(create_graph=True) with dp_size > 1 or main weights in fp32: the gradient of "
                f"{self._name_of(parameter)} is reduced without its graph."
            )
        # The ranks' sum of gradients over dp_size is their average.
        factor, add = 1 / bucket.sharing.divisor, index in bucket.written
        bucket.slots[index].scatter_into(bucket.open_rows(), local_tensor(gradient), factor=factor, add=add)
        bucket.written.add(index)
        parameter.grad = self._stand_ins[id(parameter)]
        if not self.synchronise:
            return
        self._pending = True
        bucket.arrived.add(index)
        self._start_arrived()

<<<<<<< HEAD
    # A store that sums are put aside in and handed over to
=======
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
        elsewhere = set(range(len(bucket.slots))) - bucket.written
        bucket.take_in(reduced, keep=self.keep_rows)
        # What a loop has put into `.grad` waits there until it is taken over.
        self._show(bucket, [index for index in elsewhere & bucket.used if bucket.slots[index].parameter.grad is None])

    def _show(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Makes gradients seen in `.grad` that autograd has not left there on this rank."""
        for index in indices:
            parameter = bucket.slots[index].parameter
            parameter.grad = self._stand_ins[id(parameter)]

    # What a loop does to `.grad`

    @torch.no_grad()
    def take_edits(self) -> None:
        """Forgets gradients that were taken out of `.grad`, and takes over those that were put there."""
        for number, bucket in enumerate(self.buckets):
            for index, slot in enumerate(bucket.slots):
                gradient = slot.parameter.grad
                if gradient is None:
                    if index in bucket.written or index in bucket.used:
                        self.complete()
                        bucket.discard_slots({index}, keep=self.keep_rows)
                elif not isinstance(gradient, ReducedGradient) or gradient.key != id(slot.parameter):
                    self.complete()
                    whole = gradient.read() if isinstance(gradient, ReducedGradient) else gradient
                    self._renew(slot.parameter)
                    self._replace((number, index), whole)

    def settle(self) -> None:
        """Makes `gradient` what a step is to use: edits and reductions are complete; every rank calls it."""
        self.take_edits()
        self.finish()

    def _renew(self, parameter: Tensor) -> None:
        """Makes another stand-in for a parameter's next gradient if somebody keeps the one of its last."""
        # Asked before this function refers to it as well.
        is_kept = is_held(self._stand_ins, id(parameter))
        present = self._stand_ins[id(parameter)]
        if is_kept or not isinstance(present, ReducedGradient):
            if isinstance(present, ReducedGradient):
                present.is_gone = True
            self._stand_ins[id(parameter)] = stand_in(parameter, self)

    def _replace(self, place: _Place, gradient: Tensor) -> None:
        bucket, index = self.buckets[place[0]], place[1]
        slot = bucket.slots[index]
        bucket.discard_slots({index}, keep=self.keep_rows)
        start, stop = owned_range(slot.entries, bucket.sharing.shard_size, bucket.sharing.shard_rank)
        self._own_columns(place).copy_(local_tensor(gradient.detach()).reshape(-1)[start:stop])

    def _own_columns(self, place: _Place) -> Tensor:
        """Returns this rank's entries `[entries]` of a gradient that is there from now on."""
        bucket, index = self.buckets[place[0]], place[1]
        bucket.used.add(index)
        parameter = bucket.slots[index].parameter
        parameter.grad = self._stand_ins[id(parameter)]
        bucket.open_shard()
        gradient = self.gradient(parameter)
        assert gradient is not None
        return gradient

    # What a `ReducedGradient` asks for

    def parameter(self, key: int) -> nn.Parameter:
        number, index = self._place_of[key]
        return self.buckets[number].slots[index].parameter

    def owned_range(self, key: int) -> tuple[int, int]:
        number, index = self._place_of[key]
        sharing = self.buckets[number].sharing
        return owned_range(self.buckets[number].slots[index].entries, sharing.shard_size, sharing.shard_rank)

    def _complete_of(self, key: int) -> None:
        """Completes a gradient that is used, with what autograd has added for a hook that comes before this one's."""
        if self._stand_ins[key].part is not None:
            self._arrive(self._place_of[key], self.parameter(key))
        self.finish()

    @torch.no_grad()
    def owned(self, key: int) -> Tensor:
        self._complete_of(key)
        gradient = self.gradient(self.parameter(key))
        return _there(gradient)

    @torch.no_grad()
    def whole(self, key: int) -> Tensor:
        self._complete_of(key)
        parameter = self.parameter(key)
        return _there(self.full_gradient(parameter)).to(parameter.dtype)

    @torch.no_grad()
    def replace(self, key: int, gradient: Tensor) -> None:
        self._complete_of(key)
        self._replace(self._place_of[key], gradient)

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forgets the gradients of these parameters, by default of all, as `zero_grad()` does."""
        self.complete()
        if parameters is None:
            for bucket in self.buckets:
                bucket.discard(keep=self.keep_rows)
            parameters = self.parameters
        else:
            parameters = list(parameters)
            slots: dict[int, set[int]] = {}
            for parameter in parameters:
                if self.owns(parameter):
                    number, index = self._place_of[id(parameter)]
                    slots.setdefault(number, set()).add(index)
            for number, indices in slots.items():
                self.buckets[number].discard_slots(indices, keep=self.keep_rows)
        for parameter in parameters:
            if isinstance(parameter.grad, ReducedGradient):
                parameter.grad = None

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
        self.take_edits()
        return not any(bucket.written or bucket.shard is not None for bucket in self.buckets)

    @property
    def waits_for_reduction(self) -> bool:
        return any(bucket.written for bucket in self.buckets)
>>>>>>> w/crash

    @property
    def is_watched(self) -> bool:
        # One of each parameter's hooks is the reducer's.
        return any(gradient_hooks(parameter) > 1 for parameter in self.parameters)

    def put_aside(self) -> list[Sum] | None:
        # An empty sum leaves its memory to the next one.
        before = None if self.is_empty else [bucket.exchange(Sum()) for bucket in self.buckets]
        self._hide()
        return before

    def take_back(self, before: list[Sum] | None) -> list[Sum]:
        if before is None:
            before = [Sum() for _ in self.buckets]
        present = [bucket.exchange(sum_) for bucket, sum_ in zip(self.buckets, before, strict=True)]
        self._hide()
        for bucket in self.buckets:
            self._show(bucket, bucket.written | bucket.used)
        return present

    def _hide(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def found(self, sums: list[Sum]) -> list[nn.Parameter]:
        return self.parameters

    @torch.no_grad()
    def hand_over(self, sums: list[Sum], factor: float, *, keep: bool) -> list[Tensor | None]:
        self.complete()
        # Of what a loop did between a pipeline's forward, which these come from, and its backward.
        self.take_edits()
        for bucket, sum_ in zip(self.buckets, sums, strict=True):
            added = sum_.written | sum_.used
            bucket.add(sum_.copy() if keep else sum_, factor)
            self._show(bucket, added)
        return [None] * len(self.parameters)

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            standing = self._stand_ins[id(parameter)]
            if standing.part is not None or not (parameter.grad is None or parameter.grad is standing):
                self._arrive(self._place_of[id(parameter)], parameter)

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        shown = {parameter for parameter in parameters if parameter.grad is not None}
        for parameter in shown:
            parameter.grad = None
        self._held, self.in_schedule = {id(parameter) for parameter in parameters}, True
        try:
            yield
        finally:
            self._held, self.in_schedule = set(), False
            for parameter in parameters:
                standing = self._stand_ins[id(parameter)]
                if parameter.grad is not None:
                    standing.part, parameter.grad = parameter.grad, standing
                elif parameter in shown:
                    parameter.grad = standing
            self.take(parameters)


def _kind(parameter: Tensor) -> tuple[torch.dtype, bool]:
    """Tells what changes when a parameter is cast or moved; `Module.to` may put another tensor into it."""
    return parameter.dtype, _HOOKED in vars(parameter)


def _same(parameters: list[nn.Parameter], others: list[nn.Parameter]) -> bool:
    return len(parameters) == len(others) and all(map(operator.is_, parameters, others))


def _arrive(reducer: "weakref.ref[GradientReducer]", place: tuple[int, int], parameter: Tensor) -> None:
    if (alive := reducer()) is not None:
        alive._arrive(place, parameter)

"""Gradients of the data parallel ranks: averaged in buckets while backward goes on, each rank keeping what it owns.

Megatron's distributed optimizer (`megatron/core/distributed/param_and_grad_buffer.py`) without its buffers: parameters
stay where they are, so that freezing, copying, saving and moving a model work as always. A gradient leaves `.grad` for
its bucket as soon as autograd has added it up, and a `ShardedGrad` stands there in its place; `gradient(parameter)`
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

from ..compat.torch_autograd import at_end_of_backward, gradient_hooks
from ..compat.torch_dtensor import local_tensor
from ..errors import UnsupportedError
from .bucket_assignment import make_buckets
from .bucket_reducer import Place
from .buckets import GradBuffer
from .grad_access import GradAccess
from .grad_sync_groups import GradSyncGroup
from .sharded_grad import ShardedGrad, grad_proxy

_MIB = 2**20
# On parameters as long as their hooks are called.
_HOOKED = "_hf_megatron_hooked"


class GradientReducer(GradAccess):
    """Averages the gradients of a model's trainable parameters over the data parallel ranks.

    Args:
        parameters: all of a model's, in its order.
        name_of (`Callable`): parameter -> its name, for errors.
        sharing_of (`Callable`): parameter -> the ranks that average its gradient.
        bucket_size (`int`, *optional*): MiB of gradient per bucket; by default what `default_capacity` says.
        main_gradients (`bool`): gradients of half-precision parameters are added up and reduced in fp32.
        keep_grad_buffer (`bool`): buckets keep their memory between steps (stages 0 and 1).

    Attributes:
        parameters: those that were trainable, or had a gradient, when the last forward began.
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
        super().__init__(keep_grad_buffer=keep_grad_buffer)
        self._name_of, self.sharing_of = name_of, sharing_of
        self.bucket_size, self.main_gradients = bucket_size, main_gradients
        self._hooks: list[Any] = []
        self._held: set[int] = set()
        # Parameters whose stand-in is not in `.grad` although they have a gradient, while a backward runs.
        self._off_stage: set[int] = set()
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
            None if self.bucket_size is None else self.bucket_size * _MIB,
            torch.float32 if self.main_gradients else None,
        )
        self._place_of = {
            id(slot.parameter): (number, index)
            for number, bucket in enumerate(self.buckets)
            for index, slot in enumerate(bucket.slots)
        }
        self._proxies = {id(parameter): grad_proxy(parameter, self) for parameter in self.parameters}
        # Autograd keeps these hooks where the cyclic collector does not look: they must not keep the model.
        reducer = weakref.ref(self)
        for parameter in self.parameters:
            setattr(parameter, _HOOKED, True)
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
            if id(parameter) in kept and isinstance(parameter.grad, ShardedGrad):
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
        if self._off_stage or any(bucket.written for bucket in self.buckets) and self._pending:
            return
        self.take_edits()
        for bucket in self.buckets:
            for index in bucket.written | bucket.used:
                parameter = bucket.slots[index].parameter
                parameter.grad = None
                self._off_stage.add(id(parameter))
        if self._off_stage:
            at_end_of_backward(self._end_backward)

    def _find_unused(self) -> None:
        """Reduces what this rank's backward has not reached: others may have, and a loop sees it in `.grad` then."""
        self._ends = False
        if self._pending and self._next < len(self.buckets):
            self.finish()

    def _end_backward(self) -> None:
        for key in self._off_stage:
            self.parameter(key).grad = self._proxies[key]
        self._off_stage.clear()

    def _arrive(self, place: Place, parameter: Tensor) -> None:
        """Takes in a parameter's gradient, which autograd has added up."""
        standing = self._proxies[id(parameter)]
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
        gradient = standing.copy_local_shard()
        # `_renew` counts who refers to it.
        del standing
        if gradient is None:
            gradient = parameter.grad
            assert gradient is not None
            if id(parameter) in self._off_stage:
                self._off_stage.remove(id(parameter))
            else:
                if index in bucket.written or index in bucket.used:
                    # Somebody took the earlier one out of `.grad` since the forward began.
                    bucket.discard_slots({index}, keep=self.keep_grad_buffer)
                self._renew(parameter)
        if gradient.requires_grad:
            raise UnsupportedError(
                f"backward(create_graph=True) with dp_size > 1 or main weights in fp32: the gradient of "
                f"{self._name_of(parameter)} is reduced without its graph."
            )
        # The ranks' sum of gradients over their number is their average.
        factor, add = 1 / bucket.sharing.divisor, index in bucket.written
        bucket.slots[index].scatter_into(bucket.open_buffer(), local_tensor(gradient), factor=factor, add=add)
        bucket.written.add(index)
        parameter.grad = self._proxies[id(parameter)]
        if not self.synchronise:
            return
        self._pending = True
        bucket.arrived.add(index)
        self._start_arrived()

    # A store that sums are put aside in and handed over to

    @property
    def is_watched(self) -> bool:
        # One of each parameter's hooks is the reducer's.
        return any(gradient_hooks(parameter) > 1 for parameter in self.parameters)

    def put_aside(self) -> list[GradBuffer] | None:
        # An empty sum leaves its memory to the next one.
        before = None if self.is_empty else [bucket.exchange(GradBuffer()) for bucket in self.buckets]
        self._hide()
        return before

    def take_back(self, before: list[GradBuffer] | None) -> list[GradBuffer]:
        if before is None:
            before = [GradBuffer() for _ in self.buckets]
        present = [bucket.exchange(sum_) for bucket, sum_ in zip(self.buckets, before, strict=True)]
        self._hide()
        for bucket in self.buckets:
            self._show(bucket, bucket.written | bucket.used)
        return present

    def _hide(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def found(self, sums: list[GradBuffer]) -> list[nn.Parameter]:
        return self.parameters

    @torch.no_grad()
    def hand_over(self, sums: list[GradBuffer], factor: float | Tensor, *, keep: bool) -> list[Tensor | None]:
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
            standing = self._proxies[id(parameter)]
            if standing.part is not None or not (parameter.grad is None or parameter.grad is standing):
                self._arrive(self._place_of[id(parameter)], parameter)

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        listing = {parameter for parameter in parameters if parameter.grad is not None}
        for parameter in listing:
            parameter.grad = None
        self._held, self.in_schedule = {id(parameter) for parameter in parameters}, True
        try:
            yield
        finally:
            self._held, self.in_schedule = set(), False
            for parameter in parameters:
                standing = self._proxies[id(parameter)]
                if parameter.grad is not None:
                    standing.part, parameter.grad = parameter.grad, standing
                elif parameter in listing:
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

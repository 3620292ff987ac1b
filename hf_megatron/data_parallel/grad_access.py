"""`.grad` of parameters whose gradients are in buckets: what it shows, and what a training loop does to it."""

import operator
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from sys import getrefcount
from typing import Protocol

import torch
from torch import Tensor, nn

from ..compat.shared import Shared
from ..compat.torch_autograd import run_after_backward
from ..compat.torch_dtensor import local_tensor
from ..errors import UnsupportedError
from .buckets import Bucket, owned_range
from .sharded_grad import ALONE, ShardedGrad, grad_proxy, is_held


class BucketHolder(Protocol):
    """The members of `GradientReducer` that the accessor uses."""

    parameters: list[nn.Parameter]
    buckets: list[Bucket]
    keep_grad_buffer: bool

    def slot(self, key: int) -> tuple[Bucket, int]:
        """Returns the bucket of the parameter with identity `key`, and the index of its slot."""

    def accumulate(self, parameter: Tensor) -> None:
        """Copies a parameter's gradient, which autograd has accumulated, into its bucket."""

    def complete(self) -> None:
        """Completes the reduction of a backward outside `no_sync`; collective."""

    def finish(self) -> None:
        """Completes the reduction of all gradients that backward left; collective."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns this rank's shard `[entries]` of a parameter's reduced gradient."""

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the reduced gradient in its parameter's shape, on every rank; collective."""


class GradAccess(Shared):
    """Keeps `.grad` and the reducer's buckets consistent; a `GradientOwner`.

    Args:
        reducer (`BucketHolder`): holds the gradients.

    Attributes:
        in_schedule: whether a pipeline adds to `.grad` outside of backward.
    """

    def __init__(self, reducer: BucketHolder):
        self.reducer = reducer
        self.in_schedule = False
        self._proxies: dict[int, ShardedGrad] = {}
        # Parameters whose gradients a pipeline keeps in `.grad` (tied weights).
        self._held: set[int] = set()
        # Parameters with a gradient whose proxy is not in `.grad` while a backward runs.
        self._detached: set[int] = set()
        # Memory of gradients that the loop has put into `.grad`, of which this rank's shard was copied.
        self._assigned: dict[int, tuple[nn.Parameter, weakref.ref[torch.UntypedStorage]]] = {}

    def make_proxies(self, parameters: Iterable[nn.Parameter]) -> None:
        """Creates the proxy of each parameter's gradient."""
        self._proxies = {id(parameter): grad_proxy(parameter, self) for parameter in parameters}

    # Proxies in `.grad`

    def show(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Sets `.grad` of these slots' parameters to the proxies of their gradients."""
        for index in indices:
            parameter = bucket.slots[index].parameter
            parameter.grad = self._proxies[id(parameter)]

    def shows_sharded(self, parameter: Tensor) -> bool:
        """Returns whether `.grad` of a parameter of any shape is a proxy."""
        return isinstance(parameter.grad, ShardedGrad)

    def hide(self) -> None:
        """Empties `.grad` of all parameters."""
        self._assigned.clear()
        for parameter in self.reducer.parameters:
            parameter.grad = None

    def clear(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the proxies of discarded gradients out of `.grad`."""
        for parameter in parameters:
            self._assigned.pop(id(parameter), None)
            if isinstance(parameter.grad, ShardedGrad):
                parameter.grad = None

    @property
    def is_detached(self) -> bool:
        """Whether proxies are out of `.grad` for the current backward."""
        return bool(self._detached)

    def detach_for_backward(self) -> None:
        """Takes the proxies of all gradients out of `.grad` until the current backward ends."""
        # Into an empty `.grad` autograd moves the gradient; an addition to a proxy would go through dispatch.
        for bucket in self.reducer.buckets:
            for index in bucket.written | bucket.used:
                parameter = bucket.slots[index].parameter
                parameter.grad = None
                self._detached.add(id(parameter))
        if self._detached:
            run_after_backward(self._attach)

    def _attach(self) -> None:
        for key in self._detached:
            self.parameter(key).grad = self._proxies[key]
        self._detached.clear()

    # Gradients that autograd accumulated

    def has_accumulated(self, parameter: Tensor) -> bool:
        """Returns whether `.grad` of a parameter of any shape has something that is not in its bucket."""
        proxy = self._proxies[id(parameter)]
        return proxy.part is not None or not (parameter.grad is None or parameter.grad is proxy)

    def is_held_back(self, parameter: Tensor) -> bool:
        """Returns whether a hook on a parameter of any shape has nothing to take in."""
        gradient, proxy = parameter.grad, self._proxies[id(parameter)]
        return id(parameter) in self._held or gradient is None or (gradient is proxy and proxy.part is None)

    def take_accumulated(self, parameter: Tensor, bucket: Bucket, index: int) -> Tensor | None:
        """Takes what autograd accumulated, of any shape, out of `.grad`, which shows the proxy afterwards.

        Args:
            bucket, index: the bucket of the parameter, and its slot.

        Returns:
            `None` if `is_held_back`.
        """
        key, proxies = id(parameter), self._proxies
        # `is_held` without a call, before this function refers to the proxy.
        is_kept = getrefcount(proxies[key]) > ALONE
        gradient, proxy = parameter.grad, proxies[key]
        part = proxy.part
        if gradient is None or key in self._held or (gradient is proxy and part is None):
            return None
        if part is not None:
            # A gradient that autograd added to the proxy in `.grad`.
            gradient, proxy.part = part, None
        elif key in self._detached:
            # The first gradient of a backward that took the proxies out of `.grad`.
            self._detached.remove(key)
        else:
            if index in bucket.written or index in bucket.used:
                # The loop removed the earlier gradient from `.grad` after the forward began.
                bucket.discard_slots({index}, keep=self.reducer.keep_grad_buffer)
            if is_kept:
                proxy = self._replace_proxy(parameter)
        parameter.grad = proxy
        return gradient

    @contextmanager
    def hold(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Leaves gradients of these parameters in `.grad` inside; afterwards their proxies carry them."""
        with_gradient = {parameter for parameter in parameters if parameter.grad is not None}
        for parameter in with_gradient:
            parameter.grad = None
        self._held, self.in_schedule = {id(parameter) for parameter in parameters}, True
        try:
            yield
        finally:
            self._held, self.in_schedule = set(), False
            for parameter in parameters:
                proxy = self._proxies[id(parameter)]
                if parameter.grad is not None:
                    proxy.part, parameter.grad = parameter.grad, proxy
                elif parameter in with_gradient:
                    parameter.grad = proxy

    # User edits of `.grad`

    @torch.no_grad()
    def sync_user_edits(self) -> None:
        """Discards gradients that were removed from `.grad`, and takes in those that were put there."""
        for bucket in self.reducer.buckets:
            if self._is_unedited(bucket):
                continue
            for index, slot in enumerate(bucket.slots):
                gradient = slot.parameter.grad
                if gradient is None:
                    self._assigned.pop(id(slot.parameter), None)
                    # Removed by the loop (`p.grad = None`): its reduction, which is collective, completes first.
                    if index in bucket.written or index in bucket.used:
                        self.reducer.complete()
                        bucket.discard_slots({index}, keep=self.reducer.keep_grad_buffer)
                # A full gradient, or another parameter's proxy, was put into `.grad`: copy this rank's shard of it.
                elif not isinstance(gradient, ShardedGrad) or gradient.key != id(slot.parameter):
                    self.reducer.complete()
                    unsharded = gradient.read() if isinstance(gradient, ShardedGrad) else gradient
                    if not isinstance(gradient, ShardedGrad):
                        memory = weakref.ref(local_tensor(gradient).untyped_storage())
                        self._assigned[id(slot.parameter)] = slot.parameter, memory
                    self._renew(slot.parameter)
                    self._replace(id(slot.parameter), unsharded)

    def _is_unedited(self, bucket: Bucket) -> bool:
        """Returns whether a bucket is in one of the usual states, found without a loop: `.grad` shows all, or none."""
        gradients = [slot.parameter.grad for slot in bucket.slots]
        if not (bucket.written or bucket.used):
            return not self._assigned and all(map(operator.is_, gradients, repeat(None)))
        # `Module.to` may swap a proxy for another tensor.
        return all(map(operator.is_, gradients, map(self._proxies.__getitem__, bucket.keys))) and all(
            issubclass(kind, ShardedGrad) for kind in set(map(type, gradients))
        )

    def find_held_buffer(self) -> nn.Parameter | None:
        """Returns a parameter whose assigned gradient the loop still holds; a backward would not add to that tensor."""
        return next((parameter for parameter, memory in self._assigned.values() if memory() is not None), None)

    def _renew(self, parameter: Tensor) -> None:
        """Replaces a parameter's proxy if something still refers to it; the old one raises when it is used."""
        # `is_held` counts references: it comes before this function has one.
        is_kept = is_held(self._proxies, id(parameter))
        if is_kept or not isinstance(self._proxies[id(parameter)], ShardedGrad):
            self._replace_proxy(parameter)

    def _replace_proxy(self, parameter: Tensor) -> ShardedGrad:
        present = self._proxies[id(parameter)]
        if isinstance(present, ShardedGrad):
            present.is_gone = True
        self._proxies[id(parameter)] = grad_proxy(parameter, self)
        return self._proxies[id(parameter)]

    def _replace(self, key: int, gradient: Tensor) -> None:
        bucket, index = self.reducer.slot(key)
        bucket.discard_slots({index}, keep=self.reducer.keep_grad_buffer)
        # Local shape -> `[entries]` -> this rank's `[stop - start]`; no communication, as every rank has the full one.
        start, stop = self.owned_range(key)
        self.open_owned(key).copy_(local_tensor(gradient.detach()).reshape(-1)[start:stop])

    def open_owned(self, key: int) -> Tensor:
        """Returns this rank's entries `[entries]` of a gradient to write to; `.grad` shows it from now on."""
        bucket, index = self.reducer.slot(key)
        bucket.used.add(index)
        self.show(bucket, [index])
        bucket.open_shard()
        gradient = self.reducer.gradient(bucket.slots[index].parameter)
        assert gradient is not None
        return gradient

    # `GradientOwner`: what a `ShardedGrad` reads and writes

    def parameter(self, key: int) -> nn.Parameter:
        """Returns the parameter with identity `key`."""
        bucket, index = self.reducer.slot(key)
        return bucket.slots[index].parameter

    def owned_range(self, key: int) -> tuple[int, int]:
        """Returns the `[start, stop)` of the flattened local parameter that this rank owns."""
        bucket, index = self.reducer.slot(key)
        return owned_range(bucket.slots[index].entries, bucket.sharing.shard_size, bucket.sharing.shard_rank)

    def _complete(self, key: int) -> None:
        """Completes a gradient before it is read or edited."""
        # A user's hook may run before the reducer's and read what autograd has just accumulated.
        if self._proxies[key].part is not None:
            self.reducer.accumulate(self.parameter(key))
        self.reducer.finish()

    @torch.no_grad()
    def owned(self, key: int) -> Tensor:
        """Returns this rank's entries `[entries]` of a reduced gradient."""
        self._complete(key)
        return _require(self.reducer.gradient(self.parameter(key)))

    @torch.no_grad()
    def unsharded(self, key: int) -> Tensor:
        """Returns a reduced gradient in its parameter's shape and dtype; collective."""
        self._complete(key)
        parameter = self.parameter(key)
        return _require(self.reducer.full_gradient(parameter)).to(parameter.dtype)

    @torch.no_grad()
    def replace(self, key: int, gradient: Tensor) -> None:
        """Replaces a gradient by a full one of any shape."""
        self._complete(key)
        self._replace(key, gradient)


def _require(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise UnsupportedError("A gradient was used that `.grad` no longer holds: clone() it before it is replaced.")
    return gradient

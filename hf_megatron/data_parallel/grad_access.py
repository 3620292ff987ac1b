"""Reduced gradients in `.grad`: what stands there, what a loop does to it, and what it asks for."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..compat.torch_dtensor import local_tensor
from ..errors import UnsupportedError
from .bucket_reducer import BucketReduction, Place
from .buckets import owned_range
from .sharded_grad import ShardedGrad, grad_proxy, is_held


class GradAccess(BucketReduction):
    """The gradients in buckets as `.grad` of their parameters; a `GradientOwner`.

    Attributes:
        in_schedule: a pipeline adds to `.grad` outside of backward.
    """

    in_schedule = False

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
                        bucket.discard_slots({index}, keep=self.keep_grad_buffer)
                elif not isinstance(gradient, ShardedGrad) or gradient.key != id(slot.parameter):
                    self.complete()
                    unsharded = gradient.read() if isinstance(gradient, ShardedGrad) else gradient
                    self._renew(slot.parameter)
                    self._replace((number, index), unsharded)

    def settle(self) -> None:
        """Makes `gradient` what a step is to use: edits and reductions are complete; every rank calls it."""
        self.take_edits()
        self.finish()

    def _renew(self, parameter: Tensor) -> None:
        """Makes another stand-in for a parameter's next gradient if somebody keeps the one of its last."""
        # Asked before this function refers to it as well.
        is_kept = is_held(self._proxies, id(parameter))
        present = self._proxies[id(parameter)]
        if is_kept or not isinstance(present, ShardedGrad):
            if isinstance(present, ShardedGrad):
                present.is_gone = True
            self._proxies[id(parameter)] = grad_proxy(parameter, self)

    def _replace(self, place: Place, gradient: Tensor) -> None:
        bucket, index = self.buckets[place[0]], place[1]
        slot = bucket.slots[index]
        bucket.discard_slots({index}, keep=self.keep_grad_buffer)
        start, stop = owned_range(slot.entries, bucket.sharing.shard_size, bucket.sharing.shard_rank)
        self._own_columns(place).copy_(local_tensor(gradient.detach()).reshape(-1)[start:stop])

    def _own_columns(self, place: Place) -> Tensor:
        """Returns this rank's entries `[entries]` of a gradient that is there from now on."""
        bucket, index = self.buckets[place[0]], place[1]
        bucket.used.add(index)
        parameter = bucket.slots[index].parameter
        parameter.grad = self._proxies[id(parameter)]
        bucket.open_shard()
        gradient = self.gradient(parameter)
        assert gradient is not None
        return gradient

    def discard(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Forgets the gradients of these parameters, by default of all, as `zero_grad()` does."""
        self.complete()
        if parameters is None:
            for bucket in self.buckets:
                bucket.discard(keep=self.keep_grad_buffer)
            parameters = self.parameters
        else:
            parameters = list(parameters)
            slots: dict[int, set[int]] = {}
            for parameter in parameters:
                if self.owns(parameter):
                    number, index = self._place_of[id(parameter)]
                    slots.setdefault(number, set()).add(index)
            for number, indices in slots.items():
                self.buckets[number].discard_slots(indices, keep=self.keep_grad_buffer)
        for parameter in parameters:
            if isinstance(parameter.grad, ShardedGrad):
                parameter.grad = None

    @property
    def is_empty(self) -> bool:
        self.take_edits()
        return not any(bucket.written or bucket.shard is not None for bucket in self.buckets)

    # What a `ShardedGrad` asks for

    def parameter(self, key: int) -> nn.Parameter:
        number, index = self._place_of[key]
        return self.buckets[number].slots[index].parameter

    def owned_range(self, key: int) -> tuple[int, int]:
        number, index = self._place_of[key]
        sharing = self.buckets[number].sharing
        return owned_range(self.buckets[number].slots[index].entries, sharing.shard_size, sharing.shard_rank)

    def _arrive(self, place: Place, parameter: Tensor) -> None:
        """Takes over what autograd has added to a parameter's gradient."""
        raise NotImplementedError

    def _complete_of(self, key: int) -> None:
        """Completes a gradient that is used, with what autograd has added for a hook that comes before this one's."""
        if self._proxies[key].part is not None:
            self._arrive(self._place_of[key], self.parameter(key))
        self.finish()

    @torch.no_grad()
    def owned(self, key: int) -> Tensor:
        self._complete_of(key)
        gradient = self.gradient(self.parameter(key))
        return _there(gradient)

    @torch.no_grad()
    def unsharded(self, key: int) -> Tensor:
        self._complete_of(key)
        parameter = self.parameter(key)
        return _there(self.full_gradient(parameter)).to(parameter.dtype)

    @torch.no_grad()
    def replace(self, key: int, gradient: Tensor) -> None:
        self._complete_of(key)
        self._replace(self._place_of[key], gradient)


def _there(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise UnsupportedError("A gradient was used that `.grad` no longer holds: clone() what is to outlive it.")
    return gradient

"""Packed forms of tensors that autograd saves: when packing is allowed, and the detection of in-place modifications.

torch compares the version counters of saved tensors only if they have no pack hooks, so each form checks them itself.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...compat.torch_autograd import hooks_on_saved_tensors_are_free, in_backward
from ...compat.torch_memory import storage_key


class Packed(Protocol):
    """Saved tensor in a packed form."""

    def unpack(self) -> Tensor:
        """Returns the tensor as it was saved; `RuntimeError` if it was modified in place since."""


def may_pack() -> bool:
    """Returns whether tensors that are saved now may be packed.

    Hooks of other code (gradient checkpointing, offloading) take precedence, and tensors saved during recomputation in
    backward are short-lived.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return hooks_on_saved_tensors_are_free() and not in_backward()


def _name(tensor: Tensor) -> str:
    return f"{tensor.type()} {list(tensor.shape)}"


def _changed(name: str, actual: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name}] is at version {actual}; expected version {expected} instead."
    )


class Version:
    """Version counter of a tensor of any shape, without its memory."""

    def __init__(self, tensor: Tensor):
        self._expected, self._name = tensor._version, _name(tensor)
        self._counter = tensor.detach()
        # Assigning `.data` replaces the memory but keeps the counter, which a detached tensor shares with its base.
        self._counter.data = tensor.new_empty(0)

    def is_current(self) -> bool:
        return self._counter._version == self._expected

    def check(self) -> None:
        """Raises the same `RuntimeError` as torch for a saved tensor that was modified in place."""
        if not self.is_current():
            raise _changed(self._name, self._counter._version, self._expected)


class Kept:
    """Saved tensor in its original form."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._expected = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        if self._tensor._version != self._expected:
            raise _changed(_name(self._tensor), self._tensor._version, self._expected)
        return self._tensor


class Remade:
    """View of a tensor that is not saved: the tensor is recomputed and viewed in the same way.

    Args:
        saved (`Tensor`): the view, of any shape.
        version (`Version`, *optional*): version of the discarded tensor, if other code can modify it.
        make (`Callable`): recomputes that tensor, with identical values and strides and in new memory.
    """

    def __init__(self, saved: Tensor, version: Version | None, make: Callable[[], Tensor]):
        self._version, self._make = version, make
        self._view = saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self) -> Tensor:
        if self._version is not None:
            self._version.check()
        with torch.no_grad():
            # autograd expects the shape and strides of the saved view, such as a linear's flattened input.
            return self._make().as_strided(*self._view)


def saved_as(x: Tensor, form: Callable[[Tensor, torch.dtype], Packed]) -> tuple[Tensor, saved_tensors_hooks]:
    """Returns the input for a matmul, equal to `x` of any shape, and the context in which to compute the matmul.

    Under autocast the input is a copy in the autocast dtype. `form` is called with each saved view of the input and
    the input's dtype.
    """
    read = x
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
        # Cast here rather than inside the matmul, whose own copy would not be recognized by `pack`.
        read = x.to(torch.get_autocast_dtype(x.device.type))
    number, dtype = storage_key(read), read.dtype

    # Views are matched by storage: a linear saves a flattened view of its input.
    def pack(saved: Tensor) -> Packed:
        return form(saved, dtype) if storage_key(saved) == number else Kept(saved)

    return read, saved_tensors_hooks(pack, lambda packed: packed.unpack())

"""What autograd saves for backward, kept in another form: when that is allowed, and how edits in place are still seen.

torch compares the version counters of saved tensors only where no pack hook was at work, so every form keeps them here.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...compat.torch_autograd import hooks_on_saved_tensors_are_free, in_backward
from ...compat.torch_memory import storage_id


class Packed(Protocol):
    """One saved tensor in another form."""

    def unpack(self) -> Tensor:
        """Returns the tensor as it was saved; `RuntimeError` where it was changed in place since."""


def may_pack() -> bool:
    """Tells whether what is saved now may be kept in another form.

    Somebody else's hooks (gradient checkpointing's, offloading) have the first word, and what a backward computes again
    lives for a moment only.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return hooks_on_saved_tensors_are_free() and not in_backward()


def _name(tensor: Tensor) -> str:
    return f"{tensor.type()} {list(tensor.shape)}"


def _changed(name: str, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name}] is at version {found}; expected version {expected} instead."
    )


class Version:
    """The version counter of a tensor of any shape, without its memory."""

    def __init__(self, tensor: Tensor):
        self._expected, self._name = tensor._version, _name(tensor)
        self._counter = tensor.detach()
        # Setting `.data` exchanges the memory and leaves the counter, which a detached tensor shares with its origin.
        self._counter.data = tensor.new_empty(0)

    def is_current(self) -> bool:
        return self._counter._version == self._expected

    def check(self) -> None:
        """Raises the `RuntimeError` that torch raises for a saved tensor that was changed in place."""
        if not self.is_current():
            raise _changed(self._name, self._counter._version, self._expected)


class Kept:
    """A saved tensor that stays as it is."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._expected = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        if self._tensor._version != self._expected:
            raise _changed(_name(self._tensor), self._tensor._version, self._expected)
        return self._tensor


class Remade:
    """A saved view of a tensor that is not kept: that tensor is made again, and viewed in the same way.

    Args:
        saved (`Tensor`): the view, of any shape.
        version (`Version`, *optional*): of the tensor that is not kept, where others may change it.
        make (`Callable`): returns that tensor again: the same bits and strides, in memory of its own.
    """

    def __init__(self, saved: Tensor, version: Version | None, make: Callable[[], Tensor]):
        self._version, self._make = version, make
        self._view = saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self) -> Tensor:
        if self._version is not None:
            self._version.check()
        with torch.no_grad():
            return self._make().as_strided(*self._view)


def saved_as(x: Tensor, form: Callable[[Tensor, torch.dtype], Packed]) -> tuple[Tensor, saved_tensors_hooks]:
    """Returns what a product shall read in place of `x`, of any shape, and the context in which to compute it.

    Under autocast that is a copy in another type. `form` is called with each view of it that is saved, and its type.
    """
    read = x
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
        # Here rather than in the product, which would save a copy that nobody knows.
        read = x.to(torch.get_autocast_dtype(x.device.type))
    number, dtype = storage_id(read), read.dtype

    def pack(saved: Tensor) -> Packed:
        return form(saved, dtype) if storage_id(saved) == number else Kept(saved)

    return read, saved_tensors_hooks(pack, lambda packed: packed.unpack())

"""Packed forms of tensors that autograd saves: when packing is allowed, and the detection of in-place modifications.

torch compares the version counters of saved tensors only if they have no pack hooks, so each form checks them itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...compat.shared import Shared
from ...compat.torch_autograd import hooks_on_saved_tensors_are_free, in_backward, nodes_can_pack, pack_operand
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


def _changed(tensor: Tensor, shape: torch.Size, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {expected} instead."
    )


class Version:
    """Version counter of a tensor of any shape, without its memory."""

    __slots__ = ("_counter", "_expected", "_shape")

    def __init__(self, tensor: Tensor):
        self._expected, self._shape = tensor._version, tensor.shape
        self._counter = tensor.detach()
        # Assigning `.data` replaces the memory but keeps the counter, which a detached tensor shares with its base.
        self._counter.data = tensor.new_empty(0)

    def is_current(self) -> bool:
        return self._counter._version == self._expected

    def check(self) -> None:
        """Raises the same `RuntimeError` as torch for a saved tensor that was modified in place."""
        if self._counter._version != self._expected:
            raise _changed(self._counter, self._shape, self._expected)


class Kept:
    """Saved tensor in its original form."""

    __slots__ = ("_expected", "_tensor")

    def __init__(self, tensor: Tensor):
        self._tensor, self._expected = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        if self._tensor._version != self._expected:
            raise _changed(self._tensor, self._tensor.shape, self._expected)
        return self._tensor


class Remade:
    """View of a tensor that is not saved: the tensor is recomputed and viewed in the same way.

    Args:
        version (`Version`, *optional*): version of the discarded tensor, if other code can modify it.
        make (`Callable`): recomputes that tensor, with identical values and strides and in new memory.
        saved (`Tensor`): the view, of any shape.
    """

    __slots__ = ("_make", "_version", "_view")

    def __init__(self, version: Version | None, make: Callable[[], Tensor], saved: Tensor):
        self._version, self._make = version, make
        self._view = saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self) -> Tensor:
        if self._version is not None:
            self._version.check()
        if not torch.is_grad_enabled():
            # autograd expects the shape and strides of the saved view, such as a linear's flattened input.
            return self._make().as_strided(*self._view)
        with torch.no_grad():
            return self._make().as_strided(*self._view)


class SavedInputs(Shared):
    """Packs what linears of a model save of their inputs.

    Attributes:
        by_node: whether the autograd node of the matmul gives access to it; otherwise hooks around the matmul do, which
            cost several times as much and are called for the weight as well.
    """

    def __init__(self) -> None:
        self.by_node = nodes_can_pack()

    def run(
        self,
        matmul: Callable[..., Tensor],
        x: Tensor,
        storage: int,
        args: tuple,
        form: Callable[[torch.dtype, Tensor], Packed],
    ) -> Tensor:
        """Returns `matmul(x, *args)`, of any shape, and packs what it saves of `x`.

        Under autocast the input is a copy in the autocast dtype.

        Args:
            storage (`int`): key of the storage of `x`.
            form: called with the input's dtype and the saved view of the input; returns its packed form.
        """
        read = x
        if torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype != torch.float64:
            # Cast here rather than inside the matmul, whose own copy would not be recognized.
            read = x.to(torch.get_autocast_dtype(x.device.type))
            storage = storage_key(read)
        pack = partial(form, read.dtype)
        if not self.by_node:
            return _run_hooked(matmul, read, args, storage, pack)
        output = matmul(read, *args)
        # A weight in another format may have a node of its own: from the next forward on, hooks pack its input.
        self.by_node = pack_operand(output, storage, pack, _unpack)
        return output


def _run_hooked(
    matmul: Callable[..., Tensor], x: Tensor, args: tuple, storage: int, form: Callable[[Tensor], Packed]
) -> Tensor:
    if not may_pack():
        return matmul(x, *args)
    forms = [form]

    # Views are matched by storage: a linear saves a flattened view of its input.
    def pack(saved: Tensor) -> Packed:
        return forms[0](saved) if storage_key(saved) == storage else Kept(saved)

    with saved_tensors_hooks(pack, _unpack):
        output = matmul(x, *args)
    # Hooks live as long as any packed tensor, such as the weight of a frozen linear.
    forms.clear()
    return output


def _unpack(packed: Packed) -> Tensor:
    return packed.unpack()

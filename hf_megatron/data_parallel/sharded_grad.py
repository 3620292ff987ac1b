"""Sharded gradient: the proxy tensor in `.grad` of a parameter whose reduced gradient is sharded over ranks.

It has no memory. Scaling, clamping and other elementwise edits act on this rank's shard only; edits of views are
written back to the gradient (`core/communication/write_through.py`). Any other read gathers the full gradient, a
collective over the ranks that share it, as with a `DTensor`.
"""

import sys
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..compat.torch_autograd import in_backward, returns_view, writes_to
from ..compat.torch_distributed import is_collective
from ..compat.torch_dtensor import dtensor_from_local, local_tensor
from ..core.communication.full_collectives import run_on_full_copies
from ..core.communication.full_tensor import gather_full_tensor, shard_like
from ..core.communication.proxy_tensor import ProxyDTensor, ProxyTensor, reject_shape_edit
from ..core.communication.write_through import FullCopy
from ..errors import UnsupportedError

_aten = torch.ops.aten
# Elementwise edits that torch does not tag as pointwise.
_OF_ENTRIES = {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default}
_ALIASES = {_aten.detach.default, _aten.alias.default}
_ADDITIONS = {_aten.add_.Tensor, _aten.add.Tensor}


class GradientOwner(Protocol):
    """Accumulates and reduces the gradients that `ShardedGrad`s refer to; `key` is the id of a parameter.

    Attributes:
        in_schedule: whether a pipeline schedule adds gradients outside of autograd's backward.
    """

    in_schedule: bool

    def parameter(self, key: int) -> Tensor:
        """Returns the parameter of any shape."""

    def owned_range(self, key: int) -> tuple[int, int]:
        """Returns the `[start, stop)` of the flattened local parameter that this rank owns."""

    def owned(self, key: int) -> Tensor:
        """Completes the reduction; returns this rank's entries `[entries]` of a parameter's gradient."""

    def unsharded(self, key: int) -> Tensor:
        """Completes the reduction; returns a parameter's gradient, of its shape, on every rank."""

    def replace(self, key: int, gradient: Tensor) -> None:
        """Replaces a parameter's gradient by a full one, of any shape."""


class ShardedGrad(ProxyTensor):
    """Proxy of the gradient of one parameter, with its shape and dtype; created by `grad_proxy`.

    Attributes:
        key: id of the parameter.
        part (`Tensor`, *optional*): local gradient that autograd has added, of any shape, until the owner takes it.
        is_gone: whether another proxy has replaced this one.
    """

    key: int
    part: Tensor | None
    is_gone: bool
    _owner: "weakref.ref[GradientOwner]"

    @property
    def owner(self) -> GradientOwner:
        """The reducer of this gradient; raises `UnsupportedError` if the proxy is outdated."""
        owner = self._owner()
        if owner is None or self.is_gone:
            raise UnsupportedError(
                "A gradient was used that `.grad` no longer holds: clone() it before it is replaced."
            )
        return owner

    @property
    def parameter(self) -> Tensor:
        """The parameter whose gradient this is."""
        return self.owner.parameter(self.key)

    def read(self) -> Tensor:
        """Returns the full gradient, in its parameter's shape and dtype; collective over the ranks that share it."""
        return self.owner.unsharded(self.key)

    @property
    def data(self) -> Tensor:
        """This gradient, which autograd never records."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch would assign memory that nothing reads. After `gradient.data += 1` Python assigns the gradient itself.
        if value is self:
            return
        if value.shape != self.shape:
            raise UnsupportedError(
                f"`.grad.data = ...` with shape {tuple(value.shape)}, but the gradient has shape {tuple(self.shape)}. "
                "Assign a tensor of its shape."
            )
        self.copy_(value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        first, kwargs = args[0], kwargs or {}
        if isinstance(first, ShardedGrad):
            reject_shape_edit(func, first)
            if func in _ALIASES:
                return first
            if func in _ADDITIONS and (in_backward() or first.owner.in_schedule):
                # Autograd adds to `.grad`: keep the local gradient for the reducer instead of gathering.
                first.part = args[1]
                return first if func is _aten.add_.Tensor else args[1]
            if returns_view(func):
                # The view is taken of the full gradient, and in-place edits of it are written back.
                full = FullCopy(first, _read_full, _replace_full)
                values = func(full.tensor, *args[1:], **kwargs)
                if full.holds(values):
                    return full.views(values)
        if is_collective(func):
            return run_on_full_copies(func, args, kwargs, ShardedGrad, _read_full, _replace_full)
        edited = writes_to(func, args, kwargs)
        if not any(isinstance(tensor, ShardedGrad) for tensor in edited):
            args, kwargs = _with_full(args, kwargs)
            return func(*args, **kwargs)
        if not func._schema.name.startswith("aten::_foreach_"):
            _edit(func, args, kwargs, edited, of_entries=func in _OF_ENTRIES or torch.Tag.pointwise in func.tags)
            return edited[0]
        # `_foreach_` edits are split into one edit per tensor.
        for index, tensor in enumerate(edited):
            single = [[value[index]] if isinstance(value, (list, tuple)) else value for value in args]
            _edit(func, single, kwargs, [tensor], of_entries=True)
        return None


class _ReducedDTensor(ShardedGrad, ProxyDTensor):
    """The gradient of a `DTensor`."""

    def __getattr__(self, name: str) -> Any:
        # The slot `_local_tensor` is never filled. A property instead would keep `Module.to` from swapping gradients.
        if name == "_local_tensor":
            return local_tensor(self.read())
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def grad_proxy(parameter: Tensor, owner: GradientOwner) -> ShardedGrad:
    """Creates the proxy for `.grad` of a parameter, of any shape."""
    kind = _ReducedDTensor if isinstance(parameter, DTensor) else ShardedGrad
    gradient = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        kind, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
    )
    # The garbage collector does not see the reference in `.grad`: the proxy must not keep the parameter or model alive.
    gradient.key, gradient.part, gradient.is_gone = id(parameter), None, False
    gradient._owner = weakref.ref(owner)
    if isinstance(parameter, DTensor):
        gradient._spec = parameter._spec  # type: ignore[attr-defined]
    return gradient


def is_held(gradients: dict[int, ShardedGrad], key: int) -> bool:
    """Returns whether anything but this dictionary refers to the proxy of `key`, which is not in `.grad` at present."""
    return sys.getrefcount(gradients[key]) > ALONE


# References to a proxy that only a dictionary holds, counted in an expression.
ALONE = next(sys.getrefcount(alone[key]) for alone, key in [({0: object()}, 0)])


def _with_full(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return tree_map_only(ShardedGrad, ShardedGrad.read, (args, kwargs))


def _edit(func: Any, args: Any, kwargs: dict[str, Any], edited: list[Tensor], *, of_entries: bool) -> None:
    """Applies an in-place function: to this rank's shard if it is elementwise, otherwise to the full gradient."""
    gradient = edited[0]
    if of_entries and isinstance(gradient, ShardedGrad) and len(edited) == 1:
        operands = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if all(_lies_like(gradient, operand) for operand in operands):
            # All operands are cut to this rank's entries, `[owned]`.
            args, kwargs = tree_map_only(Tensor, lambda operand: _own_part(gradient, operand), (args, kwargs))
            func(*args, **kwargs)
            return
    # Collective: gather, edit on every rank, and keep this rank's shard of the result.
    full_grads = {id(tensor): tensor.read() for tensor in edited if isinstance(tensor, ShardedGrad)}
    args, kwargs = tree_map_only(Tensor, lambda tensor: full_grads.get(id(tensor), tensor), (args, kwargs))
    args, kwargs = _with_full(args, kwargs)
    func(*args, **kwargs)
    for tensor in edited:
        if isinstance(tensor, ShardedGrad):
            tensor.owner.replace(tensor.key, full_grads[id(tensor)])


def _read_full(gradient: ShardedGrad) -> Tensor:
    return gather_full_tensor(gradient.read())


def _replace_full(unsharded: Tensor, gradient: ShardedGrad) -> None:
    parameter = gradient.parameter
    if isinstance(parameter, DTensor):
        unsharded = dtensor_from_local(shard_like(unsharded, parameter), parameter)
    gradient.owner.replace(gradient.key, unsharded.clone())


def _lies_like(gradient: ShardedGrad, operand: Tensor) -> bool:
    """Returns whether this rank has the operand's entries that match its shard of the gradient."""
    if isinstance(operand, ShardedGrad) and operand is not gradient:
        same = operand.shape == gradient.shape and isinstance(operand, DTensor) == isinstance(gradient, DTensor)
        return same and operand.owner.owned_range(operand.key) == gradient.owner.owned_range(gradient.key)
    if isinstance(operand, DTensor):
        is_replicated = all(placement.is_replicate() for placement in operand.placements)
        like = isinstance(gradient, DTensor) and operand.placements == gradient.placements
        return (operand.dim() == 0 and is_replicated) or (like and operand.shape == gradient.shape)
    return operand.dim() == 0 or (operand.shape == gradient.shape and not isinstance(gradient, DTensor))


def _own_part(gradient: ShardedGrad, operand: Tensor) -> Tensor:
    if isinstance(operand, ShardedGrad):
        return operand.owner.owned(operand.key)
    local = local_tensor(operand)
    return (
        local
        if local.dim() == 0 and gradient.dim()
        else local.reshape(-1)[slice(*gradient.owner.owned_range(gradient.key))]
    )

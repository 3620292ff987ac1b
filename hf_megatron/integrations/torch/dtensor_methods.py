"""`torch.Tensor` methods that `DTensor` inherits but that act on the local shard only: assigning, reading, pickling.

`parameter.data = ...` keeps the old local shard in addition to the assigned tensor; Python numbers and numpy arrays
cannot be made from DTensors; a pickled DTensor does not record whose shard it is, so every rank would load the shard of
the rank that wrote the file.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from ...compat.torch_dtensor import dtensor_from_local, local_tensor, restore_state, split_dim
from ...compat.torch_fsdp import take_memory
from ...core.collected_values import VALUE_PRESERVING, collected_value, pass_on_value
from ...core.communication.full_tensor import gather_full_tensor, shard_like
from ...core.communication.proxy_tensor import no_shared_memory, protect
from ...core.communication.write_through import WrittenBack
from ...core.mesh import is_layout_mesh
from ...errors import CheckpointError, UnsupportedError

# Include the reflected operators (`__radd__`, ...): Python calls them when the left operand is a plain tensor.
_ARITHMETIC = tuple(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv") for side in ("", "r"))
_RESHAPES = ("flatten", "ravel", "reshape", "reshape_as", "view", "view_as")
_PARTS = ("__getitem__", "chunk", "narrow", "select", "split", "unbind")
_RANK = "_hf_megatron_rank"


def _is_own(tensor: DTensor) -> bool:
    return is_layout_mesh(tensor.device_mesh)


def _is_replicated(value: Any) -> bool:
    return isinstance(value, DTensor) and all(placement.is_replicate() for placement in value.placements)


def _count_base_references(view: Tensor) -> int:
    return sys.getrefcount(view._base)


def _is_part_of_used(value: Tensor) -> bool:
    """Returns whether a tensor is a view of one with more entries that other objects refer to, such as a flat buffer.

    A part of a temporary tensor, such as the first singular vectors, is the only way to the memory of that tensor.
    """
    if isinstance(value, WrittenBack):
        return True
    if not value._is_view() or value._base.numel() <= value.numel():  # type: ignore[union-attr]
        return False
    return _count_base_references(value) > _count_base_references(torch.empty(2)[:1])


def _assign(parameter: Any, value: Any) -> None:
    """Assigns `data` of a parallelized model's DTensor, of any shape, including the local shard.

    Raises:
        UnsupportedError: the value is not a DTensor with the parameter's placements or replicated on every rank, or is
            a view of a larger tensor that is still in use.
    """
    # Check the mesh: a cast creates new parameters without attributes of the old ones.
    is_own = _is_own(parameter)
    if is_own and _is_part_of_used(value):
        raise UnsupportedError(
            f"`.data` of a sharded parameter of shape {tuple(parameter.shape)} was assigned a view of a larger tensor: "
            "it would get a copy, and edits of either would not reach the other. Assign a clone(), or load the model "
            "without tensor parallelism and ZeRO stage 3."
        )
    if is_own and _is_replicated(value) and value.shape == parameter.shape:
        # Padding in torch 2.11, which transformers applies to biases of tied heads, returns a replicated DTensor: shard
        # it again.
        value = dtensor_from_local(shard_like(local_tensor(value), parameter), parameter)
    if is_own and not (isinstance(value, DTensor) and value.placements == parameter.placements):
        raise UnsupportedError(
            "`parameter.data = ...` on a sharded parameter needs a DTensor with the same placements, such as "
            "`parameter.data * 0.5`. To copy a full tensor, use `parameter.data.copy_(...)`."
        )
    Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
    if is_own:
        # Training loops keep references to the old memory, in order to restore it.
        take_memory(parameter, value)


def _replicate_loss(tensor: Any, split: Any) -> Any:
    """Returns a plain scalar loss `[]` as a replicated DTensor on a split tensor's mesh; its gradient stays plain."""
    plain = type(tensor) is Tensor and tensor.dim() == 0 and tensor.requires_grad
    if not plain or not torch.is_grad_enabled() or not _is_own(split):
        return tensor
    mesh = split.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _with_plain_losses(stock: Callable[..., Any]) -> Callable[..., Any]:
    # torch adds a plain loss to a DTensor, but the plain loss's backward would then receive a DTensor.
    def operator(self: Any, other: Any) -> Any:
        return stock(self, _replicate_loss(other, self))

    return operator


def _format(self: Any, specification: str) -> str:
    if self.dim() == 0 and _is_own(self):
        return format(self.item(), specification)
    return Tensor.__format__(self, specification)


def _tolist(self: Any) -> Any:
    return gather_full_tensor(self).tolist() if _is_own(self) else Tensor.tolist(self)


def _numpy(self: Any, *, force: bool = False) -> Any:
    if not _is_own(self) or (self.requires_grad and not force):
        return Tensor.numpy(self, force=force)
    return protect(gather_full_tensor(self).numpy(force=force))


def _dlpack(self: Any, *args: Any, **kwargs: Any) -> Any:
    # The wrapper has no memory: another library would read beyond it.
    if _is_own(self):
        raise no_shared_memory(self)
    return Tensor.__dlpack__(self, *args, **kwargs)


class _Whole(torch.autograd.Function):
    """Gathers a DTensor `[...]`; the backward shards the gradient, which is identical on all ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.tensor = tensor.detach()
        return gather_full_tensor(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return dtensor_from_local(shard_like(gradient, ctx.tensor), ctx.tensor)


def _cuts(tensor: Any) -> list[int]:
    """Returns the split dim of each axis that shards the tensor; a dim split by two axes appears twice."""
    return [split_dim(one) for one in tensor.placements if not (one.is_replicate() or one.is_partial())]


def _is_cut_by_two(tensor: Any) -> bool:
    return len(_cuts(tensor)) > 1


def _is_cut_twice(tensor: Any) -> bool:
    return len(set(_cuts(tensor))) < len(_cuts(tensor))


def _on_full_model(name: str, where: Callable[[Any], bool]) -> Callable[..., Any]:
    """Returns a method that gathers before a recorded view, because torch orders chunks of two axes differently."""
    stock = getattr(Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = torch.is_grad_enabled() and self.requires_grad
        if not (recorded and _is_own(self) and where(self)):
            return stock(self, *args, **kwargs)
        mesh = self.device_mesh

        def lay(unsharded: Tensor) -> Tensor:
            return DTensor.from_local(unsharded, mesh, [Replicate()] * mesh.ndim, run_check=False)

        return tree_map_only(Tensor, lay, stock(_Whole.apply(self), *args, **kwargs))

    return method


def _full_tensor(stock: Callable[..., Any]) -> Callable[..., Any]:
    def full_tensor(self: Any, *, grad_placements: Any = None) -> Tensor:
        if not _is_own(self) or grad_placements is not None or not _is_cut_twice(self):
            full: Tensor = stock(self, grad_placements=grad_placements)
            return full
        unsharded: Tensor = _Whole.apply(self)
        return unsharded

    return full_tensor


def _keeping_value(name: str) -> Callable[..., Any]:
    stock = getattr(Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pass_on_value(self, stock(self, *args, **kwargs), name)

    return method


def _detach(self: Any) -> Any:
    if torch.is_inference_mode_enabled() and not self.is_inference() and _is_own(self):
        # torch cannot detach a DTensor in inference mode; `module.to(device)` does for each parameter.
        with torch.inference_mode(False):
            return pass_on_value(self, Tensor.detach(self), "detach")
    return pass_on_value(self, Tensor.detach(self), "detach")


def _reduce(self: Any, protocol: Any) -> Any:
    if (full := collected_value(self)) is not None:
        return full.__reduce_ex__(protocol)
    if _is_own(self):
        vars(self)[_RANK] = dist.get_rank()
    return Tensor.__reduce_ex__(self, protocol)


def _set_state(self: Any, state: Any) -> None:
    """Restores a pickled tensor, of any shape; raises `CheckpointError` for a shard of another rank."""
    restore_state(self, state)
    writer = vars(self).pop(_RANK, None)
    if writer is None or not dist.is_initialized():
        return
    ranks = self.device_mesh.mesh
    here, there = ((ranks == rank).nonzero().tolist() for rank in (dist.get_rank(), writer))
    if here != there:
        raise CheckpointError(
            f"A pickled shard of a tensor of shape {tuple(self.shape)} was written by rank {writer}, and rank "
            f"{dist.get_rank()} holds another one: torch.save(model.state_dict()) writes only the calling rank's "
            "shards. Save with save_pretrained() or accelerator.save_state(), or write one file per rank."
        )


def _copy_parameter(tensor: Any, memo: dict) -> Any:
    """Deep copy of a tensor of any shape; without its gradient for a parameter, as `nn.Parameter` copies itself."""
    gradient = tensor.grad if tensor.is_leaf and _is_own(tensor) and isinstance(tensor, nn.Parameter) else None
    if gradient is None:
        return Tensor.__deepcopy__(tensor, memo)
    tensor.grad = None
    try:
        return Tensor.__deepcopy__(tensor, memo)
    finally:
        tensor.grad = gradient


class TensorMethods:
    """Overrides of `torch.Tensor` methods for DTensors, until `remove()`."""

    def __init__(self) -> None:
        # The only overridden method that DTensor itself defines.
        self._full_tensor = DTensor.full_tensor
        self._methods = {
            **{name: _with_plain_losses(getattr(Tensor, name)) for name in _ARITHMETIC},
            **{name: _keeping_value(name) for name in VALUE_PRESERVING},
            "detach": _detach,
            **{name: _on_full_model(name, _is_cut_by_two) for name in _RESHAPES},
            **{name: _on_full_model(name, _is_cut_twice) for name in _PARTS},
            "full_tensor": _full_tensor(DTensor.full_tensor),
            "__deepcopy__": _copy_parameter,
            "data": property(Tensor.data.__get__, _assign),  # type: ignore[attr-defined]
            "__format__": _format,
            "tolist": _tolist,
            "numpy": _numpy,
            "__dlpack__": _dlpack,
            "__reduce_ex__": _reduce,
            "__setstate__": _set_state,
        }
        for name, method in self._methods.items():
            setattr(DTensor, name, method)

    def remove(self) -> None:
        for name in self._methods:
            delattr(DTensor, name)
        DTensor.full_tensor = self._full_tensor  # type: ignore[method-assign]


def replace_tensor_methods() -> TensorMethods:
    """Installs the overrides and returns their removal handle."""
    return TensorMethods()

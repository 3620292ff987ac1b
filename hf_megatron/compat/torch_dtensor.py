"""Private symbols of torch's DTensor and DeviceMesh."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .torch_autograd import is_functional
from .versions import _minor


def split_mesh_axis(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Splits the first mesh axis into several (`DeviceMesh._unflatten`, private)."""
    return mesh._unflatten(0, sizes, names)


def flat_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Flattens neighboring axes of a mesh into one that FSDP2 recognizes as part of the same mesh."""
    return mesh[names]._flatten("_".join(names))


def strided_shard(dim: int, groups: int) -> Any:
    """Returns the placement that splits each of a dim's `groups` equal blocks (private)."""
    return _StridedShard(dim=dim, split_factor=groups)


def make_wrapper(cls: Any, like: torch.Tensor, device: torch.device) -> Any:
    """Creates a tensor of a subclass without storage, shaped and typed as `like` (private)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
    )


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Returns DTensor's custom handlers, which run before its dispatch: operator -> function (private)."""
    return DTensor._op_dispatcher._custom_op_handlers


def register_dtensor_subclass(kind: Any) -> None:
    """Registers a DTensor subclass's `__torch_dispatch__` for all operators; torch 2.11 does not (private)."""
    if _minor(torch.__version__) > (2, 11):
        return
    from torch._library.simple_registry import singleton

    for name in torch._C._dispatch_get_all_op_names():
        singleton.find(name).torch_dispatch_rules.register(kind, kind.__torch_dispatch__.__func__)


def has_no_rule(func: Any) -> bool:
    """Returns whether `DTensor` has no sharding rule for an operator (private; torch 2.12 added many rules)."""
    known = DTensor._op_dispatcher.sharding_propagator
    return not any(func in rules for rules in (known.op_strategy_funcs, known.op_single_dim_strategy_funcs))


def joins_split_dims() -> bool:
    """Returns whether a view of a `DTensor` can merge a split dim into the one before it (torch 2.11 raises)."""
    return _minor(torch.__version__) > (2, 11)


def split_dim(placement: Any) -> int:
    """Returns the dim that a placement splits; -1 for a partial sum."""
    return -1 if placement.is_partial() else placement.dim


def count_shard_blocks(placement: Any) -> int:
    """Returns the number of equal blocks that a placement splits individually."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def place_in_run(sharding: Any, source: Any, index: int) -> int | None:
    """Maps the index of a dim-0 slice to one that transformers' loader recognizes as local.

    The loader assumes that a rank's slices form one contiguous range; a dim whose blocks are split
    individually has several.

    Args:
        sharding: the loader's `DtensorShardOperation`.
        source: the tensor, or slice of a safetensors file, to read.
        index: index of the slice.

    Returns:
        An index that the loader treats as this rank's, or `None` if the slice belongs to another rank.
    """
    shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()
    if len(shape) == sharding.param_ndim:
        return index
    mesh, block = sharding.device_mesh, sharding._axis0_size
    for axis, placement in enumerate(sharding.placements):
        if count_shard_blocks(placement) > 1 and placement.dim == 0:
            block //= placement.split_factor
            width = -(-block // mesh.size(axis))
            is_own = index % block // width == mesh.get_local_rank(axis)
            return sharding._axis0_offset if is_own else None
    return index


def accept_full(sharding: Any, parameter: DTensor) -> None:
    """Configures transformers' loader to read a scalar parameter `[]`, whose first dim it would access (5.23).

    Args:
        sharding: the loader's `DtensorShardOperation`, without attributes yet.
        parameter: the parameter to load.
    """
    sharding.device_mesh, sharding.placements = parameter.device_mesh, tuple(parameter.placements)
    sharding.param_ndim, sharding._axis0_offset = 0, 0
    sharding._axis0_local_size = sharding._axis0_size = 1


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh from which a mesh was sliced (private)."""
    return mesh._get_root_mesh()


def dtensor_from_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """Creates a DTensor with the placements of another from a local tensor of any shape, without communication."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def resized_dtensor(local: torch.Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """Creates a DTensor of another contiguous global `shape` on the mesh of `like`, from its local shard."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def all_reduce_partial_(tensor: DTensor) -> None:
    """All-reduces a partial DTensor of any shape in place (`_spec` and `_local_tensor` are private)."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    reduced = tensor.redistribute(placements=placements)
    tensor._local_tensor, tensor._spec = reduced._local_tensor, reduced._spec


# Storages of gradients passed on as DTensors, while anything references them.
_handed_over: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def _clone_if_shared(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient of any shape, copied if it shares memory with another parameter's.

    Autograd passes the same tensor to both operands of an addition. It detects that for plain gradients, into which it
    later accumulates in place, but not inside of two DTensors.
    """
    if is_functional(gradient):
        return gradient
    gradient = gradient.clone() if gradient.untyped_storage() in _handed_over else gradient
    _handed_over.add(gradient.untyped_storage())
    return gradient


class _LocalView(torch.autograd.Function):
    """`DTensor.to_local` and its backward without its checks and without building a new spec in each call."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        # Returns the local shard; its gradient becomes a DTensor with the parameter's spec.
        local = parameter._local_tensor
        ctx.spec, ctx.strides = parameter._spec, local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        if gradient.stride() != ctx.strides:
            # Autograd only checks the DTensor's spec, but fused optimizers traverse memory linearly: match the shard's
            # strides.
            in_order = torch.empty_strided(gradient.shape, ctx.strides, dtype=gradient.dtype, device=gradient.device)
            gradient = in_order.copy_(gradient)
        return DTensor(_clone_if_shared(gradient), ctx.spec, requires_grad=False)


def dtensor_local_view(parameter: DTensor) -> torch.Tensor:
    """Returns the differentiable local tensor of a parameter of any shape; its gradient arrives as a DTensor.

    Uses private fields and the constructor of `DTensor`; the compiler supports `to_local`.
    """
    return parameter.to_local() if torch.compiler.is_dynamo_compiling() else _LocalView.apply(parameter)


def restore_state(tensor: torch.Tensor, state: Any) -> None:
    """Restores the attributes of an unpickled tensor of any shape (private)."""
    torch._utils._set_obj_state(tensor, state)


def is_packed(value: Any) -> bool:
    """Returns whether a value is a tensor subclass that holds other tensors (torchao), other than a `DTensor`."""
    return is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor, of any shape, without the autograd node of `to_local`, or a plain tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors, of any shape, inside a quantized weight; a plain tensor returns itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    return [tensor.detach().as_subclass(torch.Tensor)]

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
    """Makes two axes out of one (`DeviceMesh._unflatten`, private in torch 2.11 to 2.13)."""
    return mesh._unflatten(0, sizes, names)


def flat_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Joins neighbouring axes of a mesh to one, which FSDP2 takes for a part of the same mesh."""
    return mesh[names]._flatten("_".join(names))


def strided_shard(dim: int, groups: int) -> Any:
    """Splits a dim made of `groups` equal blocks one by one (private in torch 2.11 to 2.13)."""
    return _StridedShard(dim=dim, split_factor=groups)


def make_wrapper(cls: Any, like: torch.Tensor, device: torch.device) -> Any:
    """Makes a tensor of a subclass, of another's shape and dtype and without memory (private in torch 2.11 to 2.13)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
    )


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Returns what DTensor asks first: operator -> function of it, its arguments and keywords (private)."""
    return DTensor._op_dispatcher._custom_op_handlers


def ask_subclass_of_dtensor(kind: Any) -> None:
    """Has torch ask a class derived from `DTensor` for each operator, which torch 2.11 keeps from them (private)."""
    if _minor(torch.__version__) > (2, 11):
        return
    from torch._library.simple_registry import singleton

    for name in torch._C._dispatch_get_all_op_names():
        singleton.find(name).torch_dispatch_rules.register(kind, kind.__torch_dispatch__.__func__)


def has_no_rule(func: Any) -> bool:
    """Tells whether `DTensor` cannot compute an operator (private; torch 2.12 has many rules that 2.11 has not)."""
    known = DTensor._op_dispatcher.sharding_propagator
    return not any(func in rules for rules in (known.op_strategy_funcs, known.op_single_dim_strategy_funcs))


def joins_split_dims() -> bool:
    """Tells whether a view of a `DTensor` can join a split dim to the one before it (torch 2.11 raises)."""
    return _minor(torch.__version__) > (2, 11)


def split_dim(placement: Any) -> int:
    """Returns the dim that a placement splits; a partial sum splits none."""
    return -1 if placement.is_partial() else placement.dim


def blocks_of_shard(placement: Any) -> int:
    """Counts the equal blocks that a placement splits one by one."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def place_in_run(sharding: Any, source: Any, index: int) -> int | None:
    """Tells transformers' loader where a slice of dim 0 lies in the one run of them that it takes for a rank's.

    Its own arithmetic (5.21 to 5.23) knows no ranks with several, those of a dim whose blocks are split one by one.

    Args:
        sharding: its `DtensorShardOperation`.
        source: what is read, a tensor or a slice of a safetensors file.
        index: of the slice.

    Returns:
        An index that it takes for this rank's, `None` for what is another rank's.
    """
    shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()
    if len(shape) == sharding.param_ndim:
        return index
    mesh, block = sharding.device_mesh, sharding._axis0_size
    for axis, placement in enumerate(sharding.placements):
        if blocks_of_shard(placement) > 1 and placement.dim == 0:
            block //= placement.split_factor
            width = -(-block // mesh.size(axis))
            is_own = index % block // width == mesh.get_local_rank(axis)
            return sharding._axis0_offset if is_own else None
    return index


def accept_full(sharding: Any, parameter: DTensor) -> None:
    """Has transformers' loader read a parameter without dims `[]` whole, whose first dim it asks for (5.23).

    Args:
        sharding: its `DtensorShardOperation`, without attributes yet.
        parameter: what is read.
    """
    sharding.device_mesh, sharding.placements = parameter.device_mesh, tuple(parameter.placements)
    sharding.param_ndim, sharding._axis0_offset = 0, 0
    sharding._axis0_local_size = sharding._axis0_size = 1


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that another was cut from (private in torch 2.11 to 2.13)."""
    return mesh._get_root_mesh()


def dtensor_from_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """Makes a DTensor like another around a local tensor of any shape, without communication."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def all_reduce_partial_(tensor: DTensor) -> None:
    """Gives every rank the sum of a DTensor's terms, of any shape (`_spec` and `_local_tensor` are private)."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    unsharded = tensor.redistribute(placements=placements)
    tensor._local_tensor, tensor._spec = unsharded._local_tensor, unsharded._spec


# Memory that gradients of parameters were handed over in, for as long as something holds it.
_handed_over: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def _of_its_own(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient of any shape that shares no memory with another parameter's.

    Autograd gives both addends of a sum the same tensor. It sees that where it keeps it as a gradient, to which it adds
    in place later on, but not inside of two DTensors.
    """
    if is_functional(gradient):
        return gradient
    gradient = gradient.clone() if gradient.untyped_storage() in _handed_over else gradient
    _handed_over.add(gradient.untyped_storage())
    return gradient


class _LocalView(torch.autograd.Function):
    """`DTensor.to_local` and its backward without the checks and the specification made anew on each call."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        local = parameter._local_tensor
        ctx.spec, ctx.strides = parameter._spec, local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        if gradient.stride() != ctx.strides:
            # Autograd looks at the specification alone; fused optimizers go through memory from end to end.
            in_order = torch.empty_strided(gradient.shape, ctx.strides, dtype=gradient.dtype, device=gradient.device)
            gradient = in_order.copy_(gradient)
        return DTensor(_of_its_own(gradient), ctx.spec, requires_grad=False)


def dtensor_local_view(parameter: DTensor) -> torch.Tensor:
    """Returns the differentiable local tensor of a parameter of any shape; its gradient arrives as a DTensor.

    Uses private fields and the constructor of `DTensor`, the same in torch 2.11 to 2.13; the compiler knows `to_local`.
    """
    return parameter.to_local() if torch.compiler.is_compiling() else _LocalView.apply(parameter)


def restore_state(tensor: torch.Tensor, state: Any) -> None:
    """Gives an unpickled tensor of any shape its attributes (private)."""
    torch._utils._set_obj_state(tensor, state)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's storage, of any shape, without the autograd node of `to_local`; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Lists the tensors, of any shape, that a quantised weight is made of; a plain one is its own."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in plain_parts(getattr(tensor, name))]
    return [tensor.detach().as_subclass(torch.Tensor)]

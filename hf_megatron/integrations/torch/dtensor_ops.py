"""Operators on sharded DTensors that DTensor lacks or gets wrong: entry edits, random numbers, sums over parameters.

DTensor copies when it indexes a split dim, so that edits of the result are lost; it rejects plain masks and indices,
draws other random numbers than a single process, and converts only the local term of a partial sum to a Python number.
For tensors on a mesh of this library, these operators work on the full tensor. DTensor also computes on a single mesh
only, while weights replicated over neighboring ranks may have their own mesh.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from ...compat.torch_autograd import switch_mean_to_sum, writes_to
from ...compat.torch_distributed import list_collectives
from ...compat.torch_dtensor import (
    all_reduce_partial_,
    count_shard_blocks,
    dtensor_from_local,
    dtensor_handlers,
    has_no_rule,
    joins_split_dims,
    local_tensor,
    split_dim,
)
from ...compat.torch_memory import share_memory
from ...core.communication.full_collectives import run_on_full_copies
from ...core.communication.full_tensor import copy_local_shard, gather_full_tensor, is_split_along, shard_like
from ...core.communication.write_through import FullCopy
from ...core.mesh import is_layout_mesh
from ...errors import UnsupportedError

_aten = torch.ops.aten

# Operators with a dim: (position of the dim argument, its default).
_ALONG_DIM: Mapping[Any, tuple[int, int]] = {
    _aten.slice.Tensor: (1, 0),
    _aten.select.int: (1, 0),
    _aten.split.Tensor: (2, 0),
    _aten.split_with_sizes.default: (2, 0),
    _aten.unbind.int: (1, 0),
}
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default)
_VIEWS = (*_ALONG_DIM, _aten.diagonal.default, *_RESHAPES)
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn", "zeros")
# Operators that do not read the tensor that they write to, so that it need not be gathered first.
_OVERWRITING = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.cauchy_.default,
    _aten.log_normal_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.randn_like.default,
    _aten.rand_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
    # `torch.eye(..., out=weight)`: DTensor would write the full result to the local shard and resize it.
    *(
        getattr(getattr(_aten, name), overload)
        for name in _FACTORIES
        for overload in getattr(_aten, name).overloads()
        if overload.endswith("out")
    ),
)
# Operators that draw random numbers with probabilities from their input.
_RANDOM_FROM_INPUT = (
    *(_aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli_.Tensor),
    *(_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default),
)
# Backward operators of losses averaged over all entries.
_MEAN_LOSS_BACKWARDS = (
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss_backward.default,
    _aten.soft_margin_loss_backward.default,
    _aten.binary_cross_entropy_backward.default,
)
# Operators that read or edit entries chosen by a mask, an index or a tensor.
_INDEXED = (
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
    _aten.index.Tensor,
    _aten.index_put_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_copy_.default,
    _aten.index_add_.default,
    _aten.fill_.Tensor,
    _aten.scatter_.src,
    _aten.scatter_.value,
    _aten.scatter_add_.default,
    _aten.masked_scatter_.default,
)
# Operators without a DTensor sharding rule: they run on the full tensor.
_NEEDS_FULL = (
    *(_aten.renorm.default, _aten.renorm_.default, _aten.histc.default, _aten.histogram.bin_ct),
    *filter(has_no_rule, (_aten.flip.default, _aten.roll.default)),
)
# Operators that are not linear, so that partial sums must be all-reduced first.
_NEEDS_REDUCED = (_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default)
# In-place operators that torch rejects for partial sums, or runs on each rank's term.
_EDITS = (
    *(
        getattr(_aten, f"{name}_").default
        for name in ("clamp", "clamp_min", "clamp_max", "sqrt", "rsqrt", "reciprocal")
    ),
    _aten.pow_.Scalar,
    # Every rank's term would become the value.
    _aten.fill_.Scalar,
)
# In-place operators on lists of tensors.
# DTensor compares the dim with the sharded one without resolving a negative dim.
_CUMULATIVE = (_aten.cumsum.default, _aten.cumprod.default, _aten.logcumsumexp.default)
_EDITS_OF_LISTS = tuple(
    getattr(getattr(_aten, name), overload)
    for name in dir(torch)
    if name.startswith("_foreach_") and name.endswith("_")
    for overload in getattr(_aten, name).overloads()
    if overload != "out"
)
# Operators whose operands all need the placements of the sharded one.
_POINTWISE = (
    *(getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")),
    _aten.addcmul.default,
    _aten.addcmul_.default,
    _aten.lerp.Scalar,
    _aten.lerp_.Scalar,
    _aten.maximum.default,
    _aten.minimum.default,
    _aten.copy_.default,
    _aten.stack.default,
)


def _view(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    # Views recorded by autograd stay DTensor's: torch raises for in-place edits of views of parameters.
    if tensor.requires_grad and torch.is_grad_enabled():
        if func in _RESHAPES and _count_split_axes(tensor) > 1:
            raise UnsupportedError(
                f"A torch function creates a view of a weight of shape {tuple(tensor.shape)} that is sharded over two "
                "axes, while autograd records. Call the weight's own flatten(), view() or reshape()."
            )
        return _stock(func, args, kwargs)
    # An edit of a view of one rank's terms would not be an edit of the sum, and slices copy the terms.
    if any(placement.is_partial() for placement in tensor.placements):
        all_reduce_partial_(tensor)
    if func in _ALONG_DIM:
        place, default = _ALONG_DIM[func]
        dim = args[place] if len(args) > place else kwargs.get("dim", default)
        if not is_split_along(tensor, dim % tensor.dim()):
            return _stock(func, args, kwargs)
    elif func not in _RESHAPES or _can_be_viewed(tensor):
        result = _stock(func, args, kwargs)
        if share_memory(local_tensor(result), local_tensor(tensor)):
            return result
    # Edits of a local result would not reach the tensor: return views of a full copy that write back to the shards.
    full = FullCopy(tensor)
    return full.views(func(full.tensor, *args[1:], **kwargs))


def _count_split_axes(tensor: DTensor) -> int:
    return sum(not placement.is_replicate() for placement in tensor.placements)


def _can_be_viewed(tensor: DTensor) -> bool:
    # No placement describes the order of entries after joining dims that two axes split.
    if _count_split_axes(tensor) > 1:
        return False
    ranks: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dim = split_dim(placement)
            ranks[dim] = ranks.get(dim, 1) * tensor.device_mesh.size(axis)
    if any(count_shard_blocks(placement) > 1 for placement in tensor.placements):
        return False
    evenly = all(dim < 0 or tensor.shape[dim] % number == 0 for dim, number in ranks.items())
    return evenly and (joins_split_dims() or max(ranks, default=0) <= 0)


def _draw(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    read = _empty if func in _OVERWRITING else gather_full_tensor
    return _on_full(func, args, kwargs, read)


def _index(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    plain = any(tensor.dim() > 0 and not isinstance(tensor, DTensor) for tensor in tensors)
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if recorded or not (plain or func in (_aten.index_put_.default, _aten.fill_.Tensor)):
        return _stock(func, args, kwargs)
    return _on_full(func, args, kwargs, gather_full_tensor)


def _run_mean_loss_backward(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # DTensor divides by this rank's number of entries: compute the backward of the sum and divide by all entries.
    of_sum = switch_mean_to_sum(func, args)
    if of_sum is None:
        return _stock(func, args, kwargs)
    return _stock(func, of_sum, kwargs) / args[1].numel()


def _read(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # DTensor would read this rank's term of a partial sum: all-reduce to the scalar `[]` first.
    return func(gather_full_tensor(args[0]).reshape(()))


def _all_reduced(tensor: DTensor) -> DTensor:
    # Partial placements become replicated, by an all-reduce.
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor if placements == list(tensor.placements) else tensor.redistribute(placements=placements)


def _run_on_reduced(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _stock(func, (_all_reduced(args[0]), *args[1:]), kwargs)


def _norms(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Norms along a split dim are partial results that DTensor adds up as if they were partial sums.
    result = _stock(func, args, kwargs)
    return _all_reduced(result) if result.dim() else result


def _find_any(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # DTensor describes ranks' results as terms of a sum: a cast before their reduction would count the ranks.
    return _all_reduced(_stock(func, args, kwargs))


def _cumulate(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor, dim = args[:2]
    return _stock(func, (tensor, dim % max(tensor.dim(), 1), *args[2:]), kwargs)


def _edit(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # torch raises for edits of partial sums: all-reduce in place first.
    if any(placement.is_partial() for placement in args[0].placements):
        all_reduce_partial_(args[0])
    return _stock(func, args, kwargs)


def _edit_list(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    result = _stock(func, args, kwargs)
    # Autograd tracks edits of single tensors only; bump the version counters of the list.
    torch.autograd.graph.increment_version(args[0])
    return result


def _reject_transpose(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise UnsupportedError(
        f"{func} is not supported on a sharded tensor of shape {tuple(args[0].shape)} (`nn.init.orthogonal_` uses it "
        "for wide weights). Initialize a full tensor, `full = nn.init.orthogonal_(torch.empty(weight.shape))`, and "
        "copy it with `weight.copy_(full)`."
    )


def _communicate(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return run_on_full_copies(func, args, kwargs, DTensor, gather_full_tensor, copy_local_shard)


def _empty(tensor: Tensor) -> Tensor:
    local = local_tensor(tensor)
    return torch.empty(tensor.shape, dtype=local.dtype, device=local.device)


def _pointwise(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    # A recorded plain tensor would need a gradient, which torch refuses: such tensors stay plain, so that torch raises.
    recorded = torch.is_grad_enabled()
    with torch.no_grad():
        return _pointwise_placed(func, args, kwargs, recorded)


def _pointwise_placed(func: Any, args: tuple, kwargs: dict[str, Any], recorded: bool) -> Any:
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
    like = next(filter(_is_split, tensors), tensors[0])
    edited = writes_to(func, args, kwargs)
    if not all(isinstance(tensor, DTensor) for tensor in edited):
        # `total += loss.detach()` with a plain `total`
        return _on_full(func, args, kwargs, gather_full_tensor)
    args, kwargs = tree_map_only(Tensor, partial(_placed_like, like=like, recorded=recorded), (args, kwargs))
    return _edit(func, args, kwargs) if edited else _stock(func, args, kwargs)


def _placed_like(tensor: Tensor, like: DTensor, recorded: bool) -> Tensor:
    """Returns a tensor with the placements of `like`, or replicated on its mesh.

    Tensors that are returned unchanged are left to torch, which raises if it cannot combine them.
    """
    if isinstance(tensor, DTensor):
        if _is_split(tensor):
            return tensor
        if tensor.device_mesh == like.device_mesh:
            is_replicated = all(placement.is_replicate() for placement in tensor.placements)
            if (
                is_replicated
                and _count_split_axes(like) > 1
                and _is_split(like)
                and _is_broadcastable(tensor.shape, like.shape)
            ):
                return dtensor_from_local(shard_like(local_tensor(tensor).expand(like.shape), like), like)
            # Otherwise torch would turn all entries of the result into partial sums instead of reducing this operand.
            return _all_reduced(tensor) if _is_split(like) else tensor
        unsharded = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return _full_on(like.device_mesh, local_tensor(unsharded))
    if tensor.dim() == 0 or (recorded and tensor.requires_grad) or not _is_broadcastable(tensor.shape, like.shape):
        return tensor
    if any(placement.is_partial() for placement in like.placements):
        return _full_on(like.device_mesh, tensor)
    return dtensor_from_local(shard_like(tensor.expand(like.shape), like), like)


def _full_on(mesh: DeviceMesh, tensor: Tensor) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_split(tensor: DTensor) -> bool:
    return any(split_dim(placement) >= 0 for placement in tensor.placements if not placement.is_replicate())


def _is_broadcastable(shape: torch.Size, target: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, other) for size, other in pairs)


@torch.no_grad()
def _on_full(func: Any, args: tuple, kwargs: dict[str, Any], read: Callable[[Any], Tensor]) -> Any:
    """Runs an operator on full tensors, as a single process does; ranks keep local shards of results and edits."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)]
    edited = writes_to(func, args, kwargs)
    # Collective: every rank of the mesh gathers `[...]` in full, or allocates it if the operator overwrites it.
    full_tensors = {id(tensor): read(tensor) for tensor in tensors}
    plain_args, plain_kwargs = tree_map_only(DTensor, lambda tensor: full_tensors[id(tensor)], (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if not edited:
        return tree_map_only(Tensor, partial(_shard_result, like=tensors[0]), result)
    for tensor in edited:
        if isinstance(tensor, DTensor):
            copy_local_shard(full_tensors[id(tensor)], tensor)
    # Most return what they edit; `rrelu_with_noise` edits the noise only.
    if isinstance(result, Tensor) and not any(result is one for one in (*full_tensors.values(), *edited)):
        return _shard_result(result, tensors[0])
    return edited[0]


def _shard_result(result: Tensor, like: DTensor) -> DTensor:
    if result.shape == like.shape:
        return dtensor_from_local(shard_like(result, like), like)
    return _full_on(like.device_mesh, result)


def _is_own(tensor: Any) -> bool:
    if not isinstance(tensor, DTensor) or torch.compiler.is_compiling():
        return False
    local = local_tensor(tensor)
    return type(local) is Tensor and not local.is_meta and is_layout_mesh(tensor.device_mesh)


def _stock(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an operator with DTensor's own implementation."""
    handlers = dtensor_handlers()
    handler = handlers.pop(func, None)
    try:
        return func(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[func] = handler


def _for_own(handler: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    first = next((value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor)), None)
    return (handler if _is_own(first) else _stock)(func, args, kwargs)


class ShardedTensorOps:
    """Overrides of DTensor operators for sharded tensors of this library, until `remove()`."""

    def __init__(self) -> None:
        self._operators = {
            **dict.fromkeys(_VIEWS, partial(_for_own, _view)),
            **dict.fromkeys((*_OVERWRITING, *_RANDOM_FROM_INPUT), partial(_for_own, _draw)),
            **dict.fromkeys(_INDEXED, partial(_for_own, _index)),
            **dict.fromkeys(_NEEDS_FULL, partial(_for_own, partial(_on_full, read=gather_full_tensor))),
            **dict.fromkeys(_MEAN_LOSS_BACKWARDS, partial(_for_own, _run_mean_loss_backward)),
            **dict.fromkeys(_NEEDS_REDUCED, partial(_for_own, _run_on_reduced)),
            **dict.fromkeys(_EDITS, partial(_for_own, _edit)),
            **dict.fromkeys(_CUMULATIVE, partial(_for_own, _cumulate)),
            _aten.linalg_vector_norm.default: partial(_for_own, _norms),
            **dict.fromkeys((_aten.any.default, _aten.any.dim, _aten.any.dims), partial(_for_own, _find_any)),
            **dict.fromkeys(list_collectives(), partial(_for_own, _communicate)),
            **dict.fromkeys(_EDITS_OF_LISTS, partial(_for_own, _edit_list)),
            _aten._local_scalar_dense.default: partial(_for_own, _read),
            _aten.t_.default: partial(_for_own, _reject_transpose),
            **dict.fromkeys(_POINTWISE, partial(_for_own, _pointwise)),
        }
        dtensor_handlers().update(self._operators)

    def remove(self) -> None:
        for operator in self._operators:
            dtensor_handlers().pop(operator, None)


def override_sharded_tensor_ops() -> ShardedTensorOps:
    """Installs the overrides and returns their removal handle."""
    return ShardedTensorOps()

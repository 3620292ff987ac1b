"""Private symbols of torch's FSDP2."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def unsharded_parameters(model: Any) -> list[torch.Tensor]:
    """Returns the unsharded weights, of any shape, that FSDP2 computes with."""
    return find_unsharded(sharded_states(model))


def sharded_states(model: Any) -> list[Any]:
    """Returns FSDP2's states of the parameters that it shards (private)."""
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return [sharded for group in groups if group is not None for sharded in group.fsdp_params]


def find_unsharded(states: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the unsharded weights, of any shape, of FSDP2's states; the first forward creates them."""
    found = [vars(sharded).get("_unsharded_param") for sharded in states]
    return [unsharded for unsharded in found if unsharded is not None]


def has_unsharded_gradients(states: Iterable[Any]) -> bool:
    """Returns whether FSDP2 holds gradients that a backward without reduction has accumulated."""
    return any(
        sharded.unsharded_accumulated_grad is not None or unsharded.grad is not None
        for sharded in states
        if (unsharded := vars(sharded).get("_unsharded_param")) is not None
    )


def discard_unsharded_gradients(states: Iterable[Any], parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Discards the accumulated, not reduced gradients of parameters of any shape, by default of all."""
    identities = None if parameters is None else set(map(id, parameters))
    for sharded in states:
        if identities is None or id(sharded.sharded_param) in identities:
            if "unsharded_accumulated_grad" in vars(sharded):
                # From torch 2.15 it is a property: the unsharded weight's `.grad`.
                sharded.unsharded_accumulated_grad = None
            if (unsharded := vars(sharded).get("_unsharded_param")) is not None:
                unsharded.grad = None


# Attribute of a parameter sharded by FSDP2: FSDP2's state of it.
_UNIT = "_hf_megatron_unit"


def take_memory(parameter: DTensor, value: DTensor) -> None:
    """Replaces the memory of a parameter, of any shape, by another DTensor's, also in FSDP2's state (private)."""
    local = value._local_tensor
    parameter._local_tensor, parameter._spec = local if local.is_contiguous() else local.contiguous(), value._spec
    sharded = vars(parameter).get(_UNIT)
    if sharded is not None and parameter.dtype == sharded._sharded_param_data.dtype:
        sharded.reset_sharded_param()


def fill_missing_gradients(
    unit: Any, fill: Callable[[torch.Tensor], torch.Tensor], filled: Callable[[Any], None]
) -> None:
    """Fills gradients of a unit's weights that a backward did not reach before FSDP2 reduces the unit.

    Otherwise ranks would reduce different sets of weights (private; 2.13 has an option for
    zeros).

    Args:
        fill: unsharded weight -> its gradient.
        filled: called with each filled parameter, as the local shard.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    for sharded in group.fsdp_params:
        vars(sharded.sharded_param)[_UNIT] = sharded
    stock = group.post_backward

    @wraps(stock)
    def post_backward(*args: Any) -> Any:
        if group.reduce_grads and group._training_state.name == "PRE_BACKWARD":
            for sharded in group.fsdp_params:
                unsharded = vars(sharded).get("_unsharded_param")
                has_none = (
                    unsharded is not None and unsharded.grad is None and sharded.unsharded_accumulated_grad is None
                )
                if has_none and unsharded.requires_grad:
                    unsharded.grad = fill(unsharded)
                    filled(sharded.sharded_param)
        return stock(*args)

    group.post_backward = post_backward


def keep_class_name(model: Any) -> None:
    """Names the class that FSDP2 puts in front of a model's class like that class.

    Code that saves a model looks up the module that defines its class, and would save FSDP2's source file.
    """
    cls = type(model)
    stock = unwrapped_class(cls)
    cls.__name__, cls.__qualname__, cls.__module__ = stock.__name__, stock.__qualname__, stock.__module__


def unwrapped_class(cls: type) -> type:
    """Returns a class without the FSDP2 class that is prepended to it (private)."""
    from torch.distributed.fsdp import FSDPModule

    return cls.__mro__[2] if issubclass(cls, FSDPModule) else cls


def replace_sharded(
    model: Any, parameter: torch.nn.Parameter, local: torch.Tensor, shape: torch.Size
) -> torch.nn.Parameter:
    """Replaces a weight that FSDP2 shards by one of another shape (private).

    Args:
        local: the new weight, `[...]`, as the other axes leave it on this rank.
        shape: its global shape.
    """
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]
    group, index = next(
        (group, index)
        for group in groups
        if group is not None
        for index, sharded in enumerate(group.fsdp_params)
        if sharded.sharded_param is parameter
    )
    old, full = group.fsdp_params[index], local
    if old.is_dtensor:
        spec: Any = old._unsharded_dtensor_spec
        stride = torch.empty(shape, device="meta").stride()
        full = DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)
    weight = torch.nn.Parameter(full, requires_grad=parameter.requires_grad)
    old._post_load_hook_handle.remove()
    new = FSDPParam(
        weight,
        old._module_info,
        old.mesh_info,
        old.post_forward_mesh_info,
        old.device,
        None,
        old.mp_policy,
        OffloadPolicy(),
    )
    new._param_fqn = old._param_fqn
    if hasattr(old, "param_dtype"):
        # The unit ran before.
        new.init_dtype_attrs(new.mp_policy)
    group.fsdp_params[index] = new
    vars(new.sharded_param)[_UNIT] = new
    return new.sharded_param


def find_units(root: Any) -> None:
    """Initializes FSDP2's units below a root, as its first forward does."""
    root._get_fsdp_state()._lazy_init()


@contextmanager
def finishing_itself(model: Any) -> Iterator[None]:
    """Finalizes FSDP2's nested backwards at their own end rather than at the end of the outer backward.

    FSDP2 records that its final callback is queued in the current backward (private).
    """
    context = model._get_fsdp_state()._state_ctx
    before, context.post_backward_final_callback_queued = context.post_backward_final_callback_queued, False
    try:
        yield
    finally:
        context.post_backward_final_callback_queued = before

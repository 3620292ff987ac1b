"""The only file that names private or version-dependent upstream symbols.

`CHECKED` says with which versions; docs/versions.md what was run on them. What to watch for: a wired-up
`enable_sequence_parallel` and a loss-parallel head in transformers make parts of this library unnecessary.
"""

import copy
import inspect
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, wraps
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import CheckpointError

# The first and the last minor version of each library that is supported; docs/versions.md says what was run on them.
CHECKED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "torch": ("2.11", "2.13"),
        "transformers": ("5.21", "5.23"),
        "accelerate": ("1.13", "1.15"),
        "trl": ("1.14", "1.16"),
        # transformers 5.21 to 5.23 take none before.
        "peft": ("0.20", "0.21"),
        "sentence_transformers": ("6.0", "6.2"),
    }
)
# Targets of patches that not every checked version has: the library, its first version with them and the first without.
_TARGETS: Mapping[str, tuple[str, str | None, str | None]] = MappingProxyType(
    {
        **{
            f"trl.trainer.{name}_trainer:add_fused_lm_head": ("trl", "1.15", None)
            for name in ("sft", "dpo", "kto", "grpo", "rloo")
        },
        "peft.utils.save_and_load:_reshard_dtensor_values_for_load": ("peft", "0.21", None),
        "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head": ("trl", None, "1.15"),
    }
)


def _minor(version: str) -> tuple[int, ...]:
    """Returns the two numbers that a version begins with; those of development versions too."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@cache
def installed_version(library: str) -> str:
    """Returns the version of an installed library; raises `PackageNotFoundError`."""
    return metadata.version(library)


def is_of_other_versions(target: str) -> bool:
    """Tells whether the installed version is one that a patch's target is known not to be in."""
    if target not in _TARGETS:
        return False
    library, first, end = _TARGETS[target]
    installed = _minor(installed_version(library))
    return (first is not None and installed < _minor(first)) or (end is not None and installed >= _minor(end))


def warn_of_unchecked_versions() -> None:
    """Warns, once for each, of imported libraries whose version is outside of what was checked."""
    for library in CHECKED:
        if library in sys.modules:
            _warn_of_version(library, installed_version(library))


@cache
def _warn_of_version(library: str, version: str) -> None:
    first, last = CHECKED[library]
    if not _minor(first) <= _minor(version) <= _minor(last):
        checked = ", ".join(f"{name} {low} to {high}" for name, (low, high) in CHECKED.items())
        warnings.warn(
            f"hf_megatron was not checked with {library} {version}, but with {checked}. Its numbers may differ from "
            "those of one process; install a version of this range, or compare with `hf-megatron check`.",
            stacklevel=2,
        )


# transformers' ALL_PARALLEL_STYLES of 5.21 to 5.23 that plans of models use. A name that is not here appeared
# later, and `registry.derive` refuses it.
KNOWN_STYLES = frozenset(
    {
        "all_reduce",
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_colwise",
        "embedding_rowwise",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "packed_colwise",
        "packed_rowwise",
        "replicate",
        "replicated_with_grad_allreduce",
        "rowwise",
        "rowwise_rep",
        "rowwise_split_input",
    }
)


def split_mesh_axis(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Makes two axes out of one (`DeviceMesh._unflatten`, private in torch 2.11 to 2.13)."""
    return mesh._unflatten(0, sizes, names)


def flat_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Joins neighbouring axes of a mesh to one, which FSDP2 takes for a part of the same mesh."""
    return mesh[names]._flatten("_".join(names))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward under way has done everything else (private; FSDP2 uses it)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Tells whether autograd computes gradients on this thread (private in torch 2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def hooks_on_saved_tensors_are_free() -> bool:
    """Tells whether nobody packs what autograd saves now, and everybody may (private in torch 2.11 to 2.13)."""
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(True) is None


def nodes_can_pack() -> bool:
    """Tells whether `pack_saved` can do anything (not in torch 2.11)."""
    return hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def pack_saved(
    node: Any, name: str, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> bool:
    """Has a node of autograd's graph keep what it has saved under a name in another form.

    `False`, and nothing is changed, where it saved nothing or somebody else packs it (`_raw_saved_*` is documented, its
    attributes are not).
    """
    saved = getattr(node, f"_raw_saved_{name}")
    if not nodes_can_pack() or saved.data is None or saved.unpack_hook is not None:
        return False
    try:
        getattr(node, f"_saved_{name}")
    except RuntimeError:
        # Changed in place since: torch says so if backward comes by.
        return False
    saved.register_hooks(pack, unpack)
    return True


def storage_id(tensor: torch.Tensor) -> int:
    """Returns what views of the same memory have in common (`_cdata` is private; fake tensors have no `data_ptr`)."""
    return tensor.untyped_storage()._cdata


def called_module(module: Any) -> Any:
    """Returns what PEFT's wrapper of a module that is saved with an adapter calls at present; another module itself."""
    if all(base.__name__ != "ModulesToSaveWrapper" for base in type(module).__mro__):
        return module
    active = (
        [] if module.disable_adapters else [name for name in module.active_adapters if name in module.modules_to_save]
    )
    return module.modules_to_save[active[0]] if active else module.original_module


def leave_uncompiled(function: Any) -> Any:
    """Keeps the compiler from tracing a function; unlike `torch.compiler.disable` imports it when first called."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


def restore_hooks(parameter: torch.Tensor) -> None:
    """Has autograd call a parameter's hooks, of any shape, again after `torch.utils.swap_tensors`, which forgets to."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        # Also without any: `register_hook` adds to what is there.
        if hooks is not None:
            setattr(parameter, name, hooks)


def accumulator(leaf: torch.Tensor) -> Any:
    """Returns the node of autograd's graph that adds to `leaf.grad`, of any shape."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def backward_node(function: Any) -> Any:
    """Returns the class of the nodes that an autograd function leaves in the graph (private in torch 2.11 to 2.13)."""
    return function._backward_cls


def unsharded_parameters(model: Any) -> Iterator[torch.Tensor]:
    """Yields the whole weights, of any shape, that FSDP2 computes with (private in torch 2.11 to 2.13)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for sharded in () if group is None else group.fsdp_params:
            # Made by the first forward.
            if (whole := vars(sharded).get("_unsharded_param")) is not None:
                yield whole


# Attribute of a parameter that FSDP2 has split: what FSDP2 knows of it.
_UNIT = "_hf_megatron_unit"


def take_memory(parameter: DTensor, value: DTensor) -> None:
    """Has a parameter, of any shape, live in another DTensor's memory, for FSDP2 too (private)."""
    local = value._local_tensor
    parameter._local_tensor, parameter._spec = local if local.is_contiguous() else local.contiguous(), value._spec
    sharded = vars(parameter).get(_UNIT)
    if sharded is not None and parameter.dtype == sharded._sharded_param_data.dtype:
        sharded.reset_sharded_param()


def fill_missing_gradients(
    unit: Any, fill: Callable[[torch.Tensor], torch.Tensor], filled: Callable[[Any], None]
) -> None:
    """Has FSDP2 reduce something for weights of a unit that a backward came by without reaching them.

    Without it a rank's reduction of the unit is of other weights than another rank's (private in torch 2.11 to 2.13,
    of which 2.13 has an option for zeros).

    Args:
        fill: whole weight -> what to take for its gradient.
        filled: told of each parameter, as this rank holds it.
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
                whole = vars(sharded).get("_unsharded_param")
                has_none = whole is not None and whole.grad is None and sharded.unsharded_accumulated_grad is None
                if has_none and whole.requires_grad:
                    whole.grad = fill(whole)
                    filled(sharded.sharded_param)
        return stock(*args)

    group.post_backward = post_backward


def runs_all(node: Any) -> bool:
    """Tells inside a backward whether it runs this node, as a `backward()` without `inputs=` runs all (private)."""
    return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]


def is_asked_for(leaf: torch.Tensor) -> bool:
    """Tells inside a backward whether `torch.autograd.grad` was called for this leaf of any shape (private).

    `register_multi_grad_hook` asks the engine in the same way; its answer for such a leaf is an error.
    """
    try:
        torch._C._will_engine_execute_node(accumulator(leaf))  # type: ignore[attr-defined]
    except RuntimeError:
        return True
    return False


def find_units(root: Any) -> None:
    """Has FSDP2 look for the units below a root, as its first forward does."""
    root._get_fsdp_state()._lazy_init()


@contextmanager
def finishing_itself(model: Any) -> Iterator[None]:
    """Has FSDP2 finish each backward that is run inside another at that one's end, not at the outer one's.

    FSDP2 notes that it has queued its last work for the backward under way (private in torch 2.11 to 2.13).
    """
    context = model._get_fsdp_state()._state_ctx
    before, context.post_backward_final_callback_queued = context.post_backward_final_callback_queued, False
    try:
        yield
    finally:
        context.post_backward_final_callback_queued = before


def strided_shard(dim: int, groups: int) -> Any:
    """Splits a dim made of `groups` equal blocks one by one (private in torch 2.11 to 2.13)."""
    return _StridedShard(dim=dim, split_factor=groups)


def make_wrapper(cls: Any, like: torch.Tensor, device: torch.device) -> Any:
    """Makes a tensor of a subclass, of another's shape and dtype and without memory (private in torch 2.11 to 2.13)."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device, requires_grad=False
    )


def writes_to(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Lists the tensors of any shape that an operator's call changes (`_schema`, private in torch 2.11 to 2.13)."""
    written = []  # type: ignore[var-annotated]
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in written if tensor is not None]


def step_hook_last(optimizer: Any, handle: Any) -> None:
    """Has an optimizer call one of its hooks before steps after all others (private in torch 2.11 to 2.13)."""
    hooks = optimizer._optimizer_step_pre_hooks
    hooks[handle.id] = hooks.pop(handle.id)


def sums_of_mean(func: Any, args: tuple) -> tuple | None:
    """Returns the arguments with which a loss's backward is that of the sum; `None` where it is not of the mean.

    The numbers are those of `torch.nn.functional._Reduction`, private in torch 2.11 to 2.13.
    """
    place = [argument.name for argument in func._schema.arguments].index("reduction")
    if len(args) <= place or args[place] != 1:
        return None
    return (*args[:place], 2, *args[place + 1 :])


def draws_numbers(func: Any) -> bool:
    """Tells whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def returns_view(func: Any) -> bool:
    """Tells whether an operator returns views of its first argument (`_schema`, private in torch 2.11 to 2.13)."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tells whether two tensors of any shape, maybe without entries, have one storage (`_cdata` is private)."""
    return storage_key(first) == storage_key(second)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what the storage of a tensor of any shape is known by while it exists, without memory too (private)."""
    return tensor.untyped_storage()._cdata  # type: ignore[attr-defined]


def fake_mode() -> Any:
    """Makes a mode in which tensors have no memory, and real ones may be used (private in torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of any shape has no memory (private)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def take_fakes_for_real() -> None:
    """Lets transformers go the ways of a training step with fake tensors, not those of a trace (`is_fake_tensor`).

    A truncated normal distribution is drawn until all of it is within its limits, which no fake tensor can say.
    Lists of values are made of one, as all stand for the same; torch asks for each (private).
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers.utils import import_utils

    def listed(tensor: Any) -> Any:
        value: Any = tensor.flatten()[0].item() if tensor.numel() else None
        for size in reversed(tensor.shape):
            value = [value] * size
        return value

    FakeTensor.tolist = listed  # type: ignore[assignment]
    import_utils.is_fake_tensor = lambda x: False
    init: Any = torch.nn.init
    drawn = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: (
        tensor if is_fake(tensor) else drawn(tensor, *args, **kwargs)
    )


def without_fakes() -> Any:
    """Leaves the fake mode that is on, if any (private)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fakes_are_on() -> bool:
    """Tells whether new tensors have no memory (private)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # type: ignore[attr-defined]


def is_made_of_others(kind: type) -> bool:
    """Tells whether operations on a class of tensors run on others inside of it; fake tensors are their own."""
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def join_fake_job(rank: int, world_size: int) -> None:
    """Makes a process group whose collectives answer at once (a test tool of torch 2.11 to 2.13)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def allocated_bytes(profiler: Any) -> list[int]:
    """Returns what a profiler saw allocated, and freed as negative numbers, in order (private in torch 2.13)."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def group_of_operation(args: tuple) -> str:
    """Returns how the process group was named that an operator of `c10d` was called with (private)."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().qualified_name():
            return dist.ProcessGroup.unbox(value).group_desc
    return ""


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


def take_whole(sharding: Any, parameter: DTensor) -> None:
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


def add_up_in_place(tensor: DTensor) -> None:
    """Gives every rank the sum of a DTensor's terms, of any shape (`_spec` and `_local_tensor` are private)."""
    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    whole = tensor.redistribute(placements=placements)
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


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


def is_functional(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of any shape stands for another one inside of a `torch.func` transform (private)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


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


def adapter_prefix(model: Any) -> str | None:
    """Returns what the names of an adapter's parameters begin with in a `PeftModel`; `None` for any other model."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    return "prompt_encoder" if model.active_peft_config.is_prompt_learning else str(model.base_model.prefix)


def is_base_model(model: Any) -> bool:
    """Tells whether a model returns hidden states, and is what other classes put a head on."""
    return model.base_model is model and not has_labels(type(model))


def has_labels(cls: type) -> bool:
    """Tells whether a class computes a loss from labels that it is called with."""
    from transformers.utils.generic import find_labels

    return bool(find_labels(cls))


def is_sentence_transformer(module: Any) -> bool:
    """Tells whether a module is a model of sentence-transformers, which saves what it is made around by itself."""
    library = sys.modules.get("sentence_transformers.base.model")
    return library is not None and isinstance(module, library.BaseModel)


def prepends_tokens(model: Any) -> bool:
    """Tells whether PEFT puts prompts in front of a model's rows, so that their first tokens are targets, too."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    return model.active_peft_config.peft_type.value in ("PROMPT_TUNING", "P_TUNING")


def ties_embeddings(model: Any) -> bool:
    """Tells whether a model's config ties its head to its embedding; some configs say nothing of it."""
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def merged_tp_plan(model: Any) -> dict[str, str]:
    """Returns the plan transformers merged from config, class and children of a model (`_tp_plan`)."""
    return dict(model._tp_plan or {})


def uses_grouped_product(module: Any) -> bool:
    """Tells whether experts multiply by torch's grouped product (names of transformers' decorator of experts)."""
    if vars(module).get("is_transposed") is None or vars(module).get("has_gate") is None:
        return False
    return bool(module.config._experts_implementation == "grouped_mm")


def grouped_rows(module: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor | None:
    """Computes `[rows, width]`, sorted by their experts `[rows]`, by products of transformers' `grouped_mm` experts.

    Its own forward would sort the rows again and put them back. `None` for a module that does not multiply so.
    """
    from transformers.integrations import moe

    product = getattr(moe, "_grouped_linear", None)
    if product is None or not uses_grouped_product(module):
        return None
    local = torch.arange(module.num_experts, device=rows.device)
    ends = torch.searchsorted(experts, local, right=True).to(torch.int32)
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias").index_select(0, experts) if module.has_bias else None
        made: torch.Tensor = product(values, getattr(module, name), ends, bias=bias, is_transposed=module.is_transposed)
        return made

    wide = linear(rows, first)
    made = linear(module._apply_gate(wide) if module.has_gate else module.act_fn(wide), "down_proj")
    return module.post_expert_norm(made) if vars(module).get("has_post_expert_norm") else made


def counted_experts(module: Any) -> int | None:
    """Counts the experts of a class that transformers' decorator of experts has made; `None` for another one."""
    own = vars(module)
    return own["num_experts"] if "_is_expert_parallel" in own else None


def token_loss_functions() -> dict[Any, bool]:
    """Maps transformers' losses over a vocabulary to whether they shift the labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    return {ForCausalLMLoss: True, ForMaskedLMLoss: False}


def adds_router_loss(model: Any) -> bool:
    """Tells whether a model adds the load balancing loss of its routers to its loss."""
    asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    return bool(asked) and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")


def loss_functions() -> dict[Any, bool]:
    """Maps transformers' losses with one kind of target, `labels`, to whether they shift them."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification

    return token_loss_functions() | {ForSequenceClassificationLoss: False, ForTokenClassification: False}  # type: ignore[dict-item]


def loss_of_type(model: Any) -> Any:
    """Looks up the loss that transformers would choose for a model now (`PreTrainedModel.loss_function`)."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), LOSS_MAPPING["ForCausalLM"])


def uses_loss_function(model: Any) -> bool:
    """Tells whether a model's forward takes its loss from `model.loss_function`, and not in lines of its own."""
    return "loss_function" in _names_used(type(model))  # type: ignore[arg-type]


def runs_behind(device: torch.device) -> bool:
    """Tells whether the host would wait for a device to read a value; torch's fake group stands for accelerators'."""
    return device.type != "cpu" or (dist.is_initialized() and dist.get_backend() == "fake")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of any shape to pinned memory of the host, in the order of its device's work.

    What is there already is not copied. A fake tensor stands for a device's memory, and gets memory that nobody fills.
    """
    if is_fake(tensor):
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.device.type == "cpu":
        return tensor.detach()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copied.copy_(tensor.detach(), non_blocking=True)


def from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Brings what `to_host` returned back to its device."""
    if fakes_are_on():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return tensor.to(device, non_blocking=True)


def check_soon(condition: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raises an error unless a scalar condition holds; on an accelerator without waiting for it.

    The device fails on its own there (`_assert_async`, private in torch 2.11 to 2.13).
    """
    if runs_behind(condition.device):
        torch._assert_async(condition)
    elif not condition:
        raise error()


def recompute_layers(model: Any) -> None:
    """Has backward compute a model's layers again (`gradient_checkpointing_enable` until transformers 5.22)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def reentrant_checkpoints(layer: Any) -> bool:
    """Tells whether backward computes a layer again by torch's reentrant checkpoints."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant"))


def recomputes_hooks() -> bool:
    """Tells whether recomputed layers run their hooks again, and keep what these are called with (not from 5.23)."""
    return _minor(installed_version("transformers")) < (5, 23)


def untied_state_dict(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a state dict, tensors of any shape, as stock `save_pretrained` writes it: tied weights once.

    Raises:
        CheckpointError: weights are shared that the class does not tie; from the files they would be drawn anew.
    """
    from transformers.modeling_utils import _get_tied_weight_keys, remove_tied_weights_from_state_dict

    state_dict = dict(state_dict)
    for name in model._keys_to_ignore_on_save or ():
        state_dict.pop(name, None)
    # The helper compares storages; tied DTensors share theirs through the same parameter.
    by_identity: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = set(model.all_tied_weights_keys)
    patterns = [*_get_tied_weight_keys(model), *map(re.escape, tied)]
    for name in list(state_dict):
        identity = id(parameters.get(name, state_dict[name]))
        first = by_identity.setdefault(identity, name)
        if first != name:
            if not any(re.search(pattern, one) for pattern in patterns for one in (first, name)):
                raise CheckpointError(
                    f"{first} and {name} are one weight, which {type(model).__name__} does not tie: "
                    "read from files, one of them would be drawn anew. Give each its own "
                    "(`torch.nn.Parameter(weight.detach().clone())`) before saving; stock transformers refuses it too."
                )
            state_dict.pop(name if name in tied or first not in tied else first, None)
    plain = {name: value for name, value in state_dict.items() if not isinstance(value, DTensor)}
    kept = remove_tied_weights_from_state_dict(dict(plain), model)
    return {name: value for name, value in state_dict.items() if name in kept or name not in plain}


def revert_conversion(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turns in-memory names and tensors of any shape into the checkpoint's (`revert_weight_conversion`)."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def forget_conversions(model: Any) -> None:
    """Lets a model be saved in its type's format; the loader, which had nothing to read, noted that it needs none."""
    del model._weight_conversions


def conversion_groups(model: Any, names: list[str]) -> list[list[str]]:
    """Groups names that one reverse conversion combines; all others are alone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    reverse = [conversion.reverse_transform() for conversion in conversions[::-1]]
    converters = [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        target, pattern = apply_converters(name, converters)
        groups.setdefault(target if pattern is not None else name, []).append(name)
    return list(groups.values())


def rearranged_targets(model: Any) -> list[str]:
    """Lists the target patterns of weight conversions that do not commute with slicing their target.

    The loader slices each source by the target's placement: right for tensors of one expert each, which are stacked,
    wrong when one is taken apart (`Chunk`), its dims change places (`Transpose`), its rows are reordered (`Interleave`)
    or others follow it along a split dim (`Concatenate`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    # The loader knows that gate and up of one expert are a half each.
    commuting = ({MergeModulelist}, {MergeModulelist, Concatenate})
    return [
        pattern
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(conversion, WeightConverter) and {type(op) for op in conversion.operations} not in commuting
        for pattern in conversion.target_patterns
    ]


def all_reduce_(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Sums a tensor of any shape over the group, in place; functionally under the compiler.

    torch 2.11 compiles the in-place call away in the backward of an autograd function.
    """
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_reduce(tensor, "sum", group))
    dist.all_reduce(tensor, group=group)
    return tensor


def all_gather_flat(shard: torch.Tensor, group: Any) -> torch.Tensor:
    """Gathers `[ranks * n, ...]` from `[n, ...]` (`all_gather_into_tensor`, `all_gather_single` in torch 2.13)."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_gather_tensor(shard, 0, group))
    output = shard.new_empty((dist.get_world_size(group) * shard.shape[0], *shard.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, shard, group=group)
    return output


def reduce_scatter_flat(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Sums `[ranks * n, ...]` into `[n, ...]` (`reduce_scatter_tensor`, renamed in torch 2.13)."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.reduce_scatter_tensor(parts, "sum", 0, group))
    output = parts.new_empty((parts.shape[0] // dist.get_world_size(group), *parts.shape[1:]))
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, parts, group=group)
    return output


def all_to_all_flat(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Sends the i-th of `ranks` equal parts of `[ranks * n, ...]` to rank i and returns what arrived."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_to_all_single(parts, None, None, group))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


@cache
def _kinds_of_masks() -> Mapping[Any, str]:
    """Returns the code of transformers' functions of masks, and what each of them is."""
    from transformers import masking_utils as masks

    closures = {
        "and": masks.and_masks(),
        "window": masks.sliding_window_overlay(1),
        "window to both sides": masks.sliding_window_bidirectional_overlay(1),
        "chunks": masks.chunked_overlay(1, torch.zeros(1)),
        "documents": masks.packed_sequence_mask_function(torch.zeros(1)),
        "padding": masks.padding_mask_function(torch.zeros(1)),
        "causal": masks.causal_mask_function,
        "full": masks.bidirectional_mask_function,
    }
    # transformers before 5.23 counts chunks of packed rows through.
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)
    if remap is not None:
        closures["positions"] = remap(masks.causal_mask_function, torch.zeros(1))
    return MappingProxyType({function.__code__: kind for kind, function in closures.items()})


def rope_types() -> frozenset[str]:
    """Names the kinds of rotary positions that transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return frozenset(("default", *ROPE_INIT_FUNCTIONS))


def mask_parts(function: Any) -> tuple[str | None, Mapping[str, Any]]:
    """Returns what one of transformers' functions of masks is, `None` for any other, and what it was made of."""
    kind = _kinds_of_masks().get(getattr(function, "__code__", None))
    return kind, {} if kind is None else inspect.getclosurevars(function).nonlocals


def reduce_scatter_started(output: torch.Tensor, parts: torch.Tensor, group: Any) -> Any:
    """Starts the sum `[n]` into `output` from `[ranks * n]`; returns its work."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, parts, group=group, async_op=True)


def all_gather_started(output: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Starts the gathering of `[ranks * n]` into `output` from `[n]`; returns its work."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=True)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silences transformers' progress bars."""
    from transformers.utils import logging

    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if progress:
            logging.enable_progress_bar()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silences transformers' report of missing weights and its bars: there is nothing to load, or another rank says."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_progress_bars():
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def without_output() -> Iterator[None]:
    """Silences transformers and torch, which show raw and at any length what somebody else's config says."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), without_progress_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def fetches_attention_core(cls: type) -> bool:
    """Tells whether a module class gets its attention function from transformers' interface, in whatever file."""
    return {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= _names_used(cls)


def computes_own_attention(cls: type) -> bool:
    """Tells whether an attention class computes the softmax in its own methods; linear attention has none."""
    softmax = {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
    return "attention" in cls.__name__.lower() and not softmax.isdisjoint(_names_used(cls))


def reshapes_to_inputs(cls: type) -> bool:
    """Tells whether a base model brings what its layers return into the shape of its inputs (GPT-2 and its kin)."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    return "output_shape" in forward.__code__.co_varnames


@cache
def _names_used(cls: type) -> frozenset[str]:
    """Names that the methods of a module class use, those it inherits and nested functions included."""
    values = [value for base in cls.__mro__ if base is not torch.nn.Module for value in vars(base).values()]
    functions = [inspect.unwrap(value) for value in values if inspect.isfunction(value)]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if inspect.iscode(constant))
    return frozenset(names)


def default_store(prefix: str) -> dist.Store:
    """Connects to the job's store by a client of its own (`_get_default_store`, private in torch 2.11 to 2.13).

    The store's own client is locked while a process group that is being made waits in it.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return dist.PrefixStore(prefix, store.clone())


def set_group_timeouts(seconds: float) -> None:
    """Sets the timeout of this rank's process groups (`_set_pg_timeout`, private in torch 2.11 to 2.13)."""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in list(_world.pg_map):
        if dist.get_rank(group) >= 0:
            _set_pg_timeout(timedelta(seconds=seconds), group)


def group_description(group: Any) -> str | None:
    """Returns how a process group was named when it was made; `None` for anything else."""
    return group.group_desc or group.group_name if isinstance(group, dist.ProcessGroup) else None


def build_weight_conversions() -> None:
    """Makes transformers compile its table of renamed weights, which every process does at its first model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def forget_accelerate_state() -> None:
    """Drops the state that every Accelerator of a process shares; a fork inherits that of the process it came from."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class _StageNumbers:
    """What torch's pipeline schedules read of a stage to make their order: numbers, no module."""

    submod = None
    has_backward = True

    def __init__(self, index: int, ranks: int, stages: int):
        self.stage_index = index
        self.group_rank = 0
        self.group_size = ranks
        self.num_stages = stages
        self.is_first = index == 0
        self.is_last = index == stages - 1


def pipeline_orders(
    schedule_class: str, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """Lists what each rank computes in a schedule of torch's pipelining: (computation, stage, microbatch).

    Computations are torch's letters: F, B, I and W (`pipeline_order` and `_Action`, private in torch 2.11 to 2.13). An
    overlapped forward and backward counts as its parts, one after the other; idle slots are left out.
    """
    from torch.distributed import pipelining

    stages = ranks * stages_per_rank
    # The order is made for all ranks alike; only the number of the local stages is read, whatever the placement.
    local = [_StageNumbers(index, ranks, stages) for index in range(0, stages, ranks)]
    # The constructor goes on to prepare the order for torch's own executor, in quadratic time.
    unprepared = {"_prepare_schedule_with_comms": lambda self, actions: None}
    order = type(schedule_class, (getattr(pipelining, schedule_class),), unprepared)(local, microbatches).pipeline_order
    return tuple(
        tuple(
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        )
        for rank in range(ranks)
    )


def add_sends_and_receives(
    orders: tuple[tuple[tuple[str, int, int], ...], ...], rank_of_stage: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """Puts SEND_F, RECV_F, SEND_B and RECV_B into orders, between stages of different ranks.

    A receive is put into its rank's order at the moment its send is put into the other's, so blocking on either cannot
    deadlock (`_add_send_recv`, private in torch 2.11 to 2.13).
    """
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

    actions: dict[int, list[Any]] = {
        rank: [_Action(stage, _ComputationType(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(orders)
        if order
    }
    # The function empties the lists it is given, and takes none that is empty from the start.
    lowered: dict[int, list[Any]] = _add_send_recv(actions, rank_of_stage.__getitem__, len(rank_of_stage))
    return tuple(
        tuple((action.computation_type.value, action.stage_index, action.microbatch_index) for action in order)
        for order in (lowered.get(rank, []) for rank in range(len(orders)))
    )


def function_between_layers(decoder: torch.nn.Module) -> Any:
    """Returns what adds features of images to `(hidden_states, ...)` between layers, of a text model that does."""
    return getattr(decoder, "_deepstack_process", None)


def recorded_outputs() -> dict[str, list[Any]]:
    """Returns what the forward under way records, such as router logits (`_active_collector`, private)."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get() or {}


def splits_python_functions() -> bool:
    """Tells whether `backward_weights` can start from an autograd `Function` (not in torch 2.11; 2.12 untried)."""
    return _minor(torch.__version__) >= (2, 13)


def detachable(tensor: torch.Tensor) -> torch.Tensor:
    """Copies views and leaves of any shape: `backward_inputs` cuts the graph off in place.

    Views do not allow that; a leaf that is passed on would need no gradient where layers are recomputed afterwards.
    """
    return tensor.clone() if tensor._is_view() or (tensor.is_leaf and tensor.requires_grad) else tensor


def backward_inputs(roots: list[Any], seeds: list[Any], inputs: tuple[Any, ...], parameters: list[Any]) -> Any:
    """Computes `inputs[i].grad` alone (torch's `stage_backward_input`); returns what `backward_weights` needs."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(roots, seeds, list(inputs), iter(parameters))[1]


def backward_weights(parameters: list[Any], groups: Any) -> None:
    """Adds the gradients that `backward_inputs` left out to `.grad`, without the parameters' hooks."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), groups)


def gradient_hooks(parameter: torch.Tensor) -> int:
    """Counts the hooks on the gradient of a parameter of any shape (private in torch 2.11 to 2.13)."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keeps hooks on the gradients of parameters from being called (private in torch 2.11 to 2.13)."""
    found = [
        (hooks, dict(hooks))
        for p in parameters
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        if hooks
    ]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.update(before)


def is_reached(edge: tuple[Any, int]) -> bool:
    """Tells inside a backward whether it goes on to a tensor, or computes gradients of others only.

    Args:
        edge: an entry of `next_functions` (`_will_engine_execute_node`, private in torch 2.11 to 2.13).
    """
    try:
        return torch._C._will_engine_execute_node(edge[0])
    except RuntimeError as error:
        # A leaf that `torch.autograd.grad` returns the gradient of.
        if "leaf node" not in str(error):
            raise
        return True


def keeps_graph() -> bool:
    """Tells inside a backward whether the graph is kept for another (private in torch 2.11 to 2.13)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def renamed_by_loader(model: Any, names: set[str]) -> set[str]:
    """Returns what transformers' loader takes weights for that a model has not, as it renames any name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

    conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    return {rename_source_key(name, renamings, converters)[0] for name in names}


def count_tokens_once(trainer: Any) -> None:
    """Keeps a TRL trainer from dividing its count of tokens by the ranks that share a batch (`_tp_size`, private)."""
    trainer._tp_size = 1


def trl_output(**fields: Any) -> Any:
    """Makes what TRL's trainers read of a forward (`FusedCausalLMOutput`, not exported)."""
    from trl.trainer.utils import FusedCausalLMOutput

    return FusedCausalLMOutput(**fields)


def trl_sums(loss: torch.Tensor, aux_loss: torch.Tensor | None, fields: Mapping[str, torch.Tensor]) -> Any:
    """Makes what TRL 1.14's `SFTTrainer` reads of a forward, of a loss `()` and fields `[batch, sequence]`."""
    from trl.trainer.sft_trainer import _ChunkedCELMHeadOutput  # type: ignore[attr-defined]

    return _ChunkedCELMHeadOutput(
        loss=loss,
        num_correct_tokens=fields["is_top1"].sum().float(),
        entropy_sum=fields["entropy"].detach().sum(),
        num_valid_tokens=fields["label_mask"].sum(),
        aux_loss=aux_loss,
    )


class LoadingGroup(NamedTuple):
    """Tensors of a file that one conversion of transformers' loader turns into weights of a model.

    Attributes:
        sources: names in the file with the pattern that each matched, in the loader's order.
        target: the weight that the loader knows the conversion by.
    """

    transform: Any
    sources: tuple[tuple[str, str], ...]
    target: str


def loading_groups(model: Any, names: Iterable[str]) -> tuple[list[LoadingGroup], list[str]]:
    """Finds how the loader would make a model's weights of a file's tensors, and names it would not expect.

    The second list leaves out what the model's class says to ignore.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    found: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    surplus = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            surplus.append(name)
        elif pattern is None:
            found.setdefault(target, (WeightRenaming(name, target), []))[1].append((name, name))
        else:
            found.setdefault(target, (by_pattern[pattern], []))[1].append((name, pattern))
    groups = [LoadingGroup(transform, tuple(sources), target) for target, (transform, sources) in found.items()]
    # Buffers of releases before that, which not every class that had them names.
    older = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")
    ignored = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or ()), *older]))
    return groups, [name for name in surplus if not ignored.search(name)]


def convert_loaded(model: Any, group: LoadingGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turns a file's tensors of any shape, by name, into weights of the model; works on meta tensors too."""
    transform = copy.deepcopy(group.transform)
    for name, pattern in group.sources:
        transform.add_tensor(group.target, name, pattern, tensors[name])
    converted = transform.convert(group.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def further_layer(model: Any, number: int) -> Any | None:
    """Makes a layer of multi-token prediction under the names of its files, as `MtpModel` would for this model.

    Returns:
        a layer of the model's own class with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`; `None` for classes
        without such layers, and those whose files name them otherwise.
    """
    from transformers.modeling_layers import MtpLayer

    said = model.config.get_text_config()
    others = ("layer_types", "mlp_layer_types", "chain_hidden_post_norm", "mtp_per_layer_config")
    if getattr(said, "num_mtp_layers", None) is None or any(getattr(said, name, None) is not None for name in others):
        return None
    last = model.get_decoder().layers[-1]
    norms = [type(module) for name, module in last.named_modules() if "norm" in name]
    made = MtpLayer(model.config.get_mtp_config(), type(last), norms[0], number)
    layer, head = made.mtp_block, torch.nn.Module()
    head.add_module("norm", made.post_norm)
    for name, module in {
        "enorm": made.enorm,
        "hnorm": made.hnorm,
        "eh_proj": made.eh_proj,
        "shared_head": head,
    }.items():
        layer.add_module(name, module)
    return layer


def rebuild_tensor() -> Callable[..., torch.Tensor]:
    """Returns what makes tensors of any shape of storages of `torch.save` (private in torch 2.11 to 2.13)."""
    return torch._utils._rebuild_tensor_v2


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Says where a blob lies in a distributed checkpoint (`_StorageInfo`, private in torch 2.11 to 2.13)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path, offset, length)


def dcp_version() -> str:
    """Returns the version that torch's distributed checkpoints note in their metadata (not exported)."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

    return CURRENT_DCP_VERSION


def global_forward_hooks() -> tuple[Callable[..., Any], ...]:
    """Lists the forward hooks that were registered with all modules (private in torch 2.11 to 2.13)."""
    from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

    return (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values())


def has_global_backward_hooks() -> bool:
    """Tells whether backward hooks were registered with all modules (private in torch 2.11 to 2.13)."""
    from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks

    return bool(_global_backward_hooks or _global_backward_pre_hooks)


def activation_classes() -> set[Any]:
    """Returns the classes of transformers' activation functions, which work on single entries (`ACT2CLS`)."""
    from transformers.activations import ACT2CLS

    return {value[0] if isinstance(value, tuple) else value for value in ACT2CLS.values()}


def follow_forward_of_bases(made: type) -> None:
    """Has a class that adds none of its own run the forward that its bases have at the time of a call.

    transformers wraps the forward of each subclass of a layer as the subclass is made (`GradientCheckpointingLayer`).
    """
    if "forward" in vars(made):
        del made.forward  # type: ignore[attr-defined]


def names_of_recorder(base: type) -> dict[str, str]:
    """Returns the attributes by which a class made of another keeps recording what that one does, such as its states.

    transformers looks up by the full name of a model's class what it records (`_CAN_RECORD_REGISTRY`, private). Other
    classes do without: torch takes modules of its own packages for what it knows.
    """
    records = hasattr(base, "_can_record_outputs")
    return {"__module__": base.__module__, "__qualname__": base.__qualname__} if records else {}


@contextmanager
def around_all_modules(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Calls one function before and one after the forwards of all modules, for as long as the context lasts."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attention_replaced(function: Callable[..., Any]) -> Iterator[None]:
    """Hands every attention module of the process this function, whatever implementation it asks for."""
    from transformers.modeling_utils import AttentionInterface

    stock = vars(AttentionInterface)["get_interface"]
    AttentionInterface.get_interface = lambda self, *args, **kwargs: function  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = stock  # type: ignore[method-assign]


def chosen_functions(config: Any) -> dict[str, Callable[..., Any]]:
    """Returns what modules call because a config names it, without functions of their own files."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = {"attn_implementation": ALL_ATTENTION_FUNCTIONS, "experts_implementation": ALL_EXPERTS_FUNCTIONS}
    chosen = {option: getattr(config, f"_{option}", None) for option in tables}
    found = {f"{option}={name!r}": tables[option].get(name) for option, name in chosen.items()}
    return {option: function for option, function in found.items() if function is not None}


# Methods of a process group that send something; which of them there are says the version.
_SENDING = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)


class _Through:
    """What stands in the place of a class's method while it is active; others may stand above it when it ends."""

    def __init__(self, owner: Any, name: str, below: Any):
        # What a class hands out is bound to no instance, and could not be put back.
        self.owner, self.name, self.below = owner, name, below
        self.is_active = True

    def install(self, function: Callable[..., Any]) -> None:
        """Puts a function in the place of what is there."""
        original = getattr(self.owner, self.name)

        def stand_in(own: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_active:
                return original(own, *args, **kwargs)
            return function(lambda: original(own, *args, **kwargs), own, self.name, args)

        vars(stand_in)[_THROUGH] = self
        setattr(self.owner, self.name, stand_in)

    def remove(self) -> None:
        """Takes it away, and what has ended below it."""
        self.is_active = False
        found = vars(self.owner)[self.name]
        while (through := getattr(found, _THROUGH, None)) is not None and not through.is_active:
            found = through.below
        setattr(self.owner, self.name, found)


_THROUGH = "_hf_megatron_through"


@contextmanager
def communication_through(
    call: Callable[[Callable[[], Any], Any, str, tuple], Any], wait: Callable[[Callable[[], Any], Any], Any]
) -> Iterator[None]:
    """Has calls of process groups and waits for their works go through functions, which call what they are given.

    Several may be under way, and end in any order.

    Args:
        call: takes the call itself, the group, the method's name and its arguments.
        wait: takes the waiting itself and the work.

    torch's own functions call these methods, which are attributes of classes (private in torch 2.11 to 2.13).
    """
    group, work = dist.ProcessGroup, dist.Work
    throughs = [_Through(group, name, vars(group)[name]) for name in _SENDING if name in vars(group)]
    waiting = _Through(work, "wait", vars(work)["wait"])
    for through in throughs:
        through.install(call)
    waiting.install(lambda own_wait, own, name, args: wait(own_wait, own))
    try:
        yield
    finally:
        for through in (*throughs, waiting):
            through.remove()


@contextmanager
def out_of_memory_observed(path: Path) -> Iterator[None]:
    """Has torch's allocator of CUDA write its snapshot where memory ends inside (private in torch 2.11 to 2.13)."""
    memory: Any = torch.cuda.memory

    def write(*args: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        memory._dump_snapshot(str(path))

    memory._record_memory_history(max_entries=100_000)
    cast(Any, torch._C)._cuda_attach_out_of_memory_observer(write)
    try:
        yield
    finally:
        memory._record_memory_history(enabled=None)


def flight_record() -> str | None:
    """Returns what torch's flight recorder has as JSON; `None` where it records nothing (private in torch 2.13).

    gloo's collectives are recorded from torch 2.13 on.
    """
    from torch._C import _distributed_c10d

    own = "_dump_nccl_trace_json" if "nccl" in str(dist.get_backend()) else "_dump_fr_trace_json"
    dump: Any = getattr(_distributed_c10d, own, None)
    if dump is None:
        return None
    text = dump().decode()
    return text if '"entries":[{' in text.replace(" ", "") else None


def group_members() -> dict[str, list[int]]:
    """Returns the ranks of each process group of this rank, by its name (private in torch 2.11 to 2.13)."""
    from torch.distributed.distributed_c10d import _world

    own = ((group, ranks) for group, ranks in _world.pg_group_ranks.items() if group in _world.pg_names)
    return {_world.pg_names[group]: sorted(ranks) for group, ranks in own}


def dispatch_modes() -> list[Any]:
    """Lists the modes that see operations on tensors now (private in torch 2.11 to 2.13)."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Keeps modes from seeing operations on tensors inside (private in torch 2.11 to 2.13)."""
    from torch.utils._python_dispatch import _disable_current_modes

    return cast(AbstractContextManager[Any], _disable_current_modes())


def enlarge_word_cache(tokenizer: Any, words: int) -> None:
    """Has a tokenizer of `tokenizers` remember the tokens of so many words, where its model does (private in 0.22)."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(words)

"""Private symbols of torch's autograd, dispatch modes and module hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any, cast

import torch

from .torch_memory import storage_key
from .versions import _minor


def run_after_backward(function: Callable[[], None]) -> None:
    """Calls a function after the current backward has completed all other work (private; FSDP2 uses it)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: makes a second differentiation of a function's backward an error, as torch's decorator does."""
    checked = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        # Torch's costs eight Python calls for a context in which gradients are off, as they are in most backwards.
        return checked(ctx, *gradients) if torch.is_grad_enabled() else backward(ctx, *gradients)

    return run


def in_backward() -> bool:
    """Returns whether autograd is running a backward on this thread (private)."""
    return torch._C._current_graph_task_id() != -1


def hooks_on_saved_tensors_are_free() -> bool:
    """Returns whether saved-tensor hooks are enabled and none are active (private)."""
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(True) is None


def nodes_can_pack() -> bool:
    """Returns whether `pack_saved` is supported (not in torch 2.11)."""
    return hasattr(torch._C._autograd.SavedTensor, "unpack_hook")


def readable_saved(node: Any, name: str) -> Any:
    """Returns what an autograd node has saved under a name, if it can be packed; otherwise `None`.

    That is not the case if the node saved nothing, or the tensor has other hooks (`_raw_saved_*` is documented, its
    attributes are not).
    """
    saved = getattr(node, f"_raw_saved_{name}")
    if not nodes_can_pack() or saved.data is None or saved.unpack_hook is not None:
        return None
    try:
        getattr(node, f"_saved_{name}")
    except RuntimeError:
        # Modified in place since it was saved: torch raises if backward uses it.
        return None
    return saved


def pack_saved(
    node: Any, name: str, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> bool:
    """Packs a tensor that an autograd node has already saved under a name; `False` if it cannot be packed."""
    saved = readable_saved(node, name)
    if saved is not None:
        saved.register_hooks(pack, unpack)
    return saved is not None


# Node of a linear's matmul -> its name for the first operand.
_FIRST_OPERANDS: Mapping[str, str] = MappingProxyType(
    {"MmBackward0": "_raw_saved_self", "AddmmBackward0": "_raw_saved_mat1", "LinearBackward0": "_raw_saved_input"}
)
# Nodes between a linear's output and its matmul: the output's view in the shape of the input.
_OUTPUT_VIEWS = frozenset(("UnsafeViewBackward0", "ViewBackward0"))


def pack_operand(
    output: torch.Tensor, storage: int, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> bool:
    """Packs what a linear has just saved of its input, a view of any shape; `False` if its matmul is not known.

    Args:
        output (`Tensor`): result of the linear, of any shape.
        storage (`int`): key of the input's storage; copies of the input are not packed.
    """
    node: Any = output.grad_fn
    if node is None:
        return True
    name = node.name()
    if name in _OUTPUT_VIEWS:
        node = node.next_functions[0][0]
        name = node.name()
    if name not in _FIRST_OPERANDS:
        return False
    saved = getattr(node, _FIRST_OPERANDS[name])
    # Nothing is saved for a frozen weight, and hooks of other code take precedence.
    if saved.data is not None and saved.unpack_hook is None and storage_key(saved.data) == storage:
        saved.register_hooks(pack, unpack)
    return True


def called_module(module: Any) -> Any:
    """Returns the module that PEFT's wrapper of saved modules or trained tokens currently calls; others unchanged."""
    if any(base.__name__ == "TrainableTokensWrapper" for base in type(module).__mro__):
        module = module.token_adapter
    if any(base.__name__ == "TrainableTokensLayer" for base in type(module).__mro__):
        return module.base_layer
    if all(base.__name__ != "ModulesToSaveWrapper" for base in type(module).__mro__):
        return module
    active = (
        [] if module.disable_adapters else [name for name in module.active_adapters if name in module.modules_to_save]
    )
    return module.modules_to_save[active[0]] if active else module.original_module


def leave_uncompiled(function: Any) -> Any:
    """Excludes a function from tracing; unlike `torch.compiler.disable`, imports the compiler at the first call."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]


def restore_hooks(parameter: torch.Tensor) -> None:
    """Re-registers a parameter's hooks, of any shape, with autograd after `torch.utils.swap_tensors` dropped them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(parameter, name)
        # Also if empty: a later `register_hook` adds to the existing dictionary.
        if hooks is not None:
            setattr(parameter, name, hooks)


def accumulator(leaf: torch.Tensor) -> Any:
    """Returns the autograd node that accumulates into `leaf.grad`, of any shape."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def run_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Applies an autograd function, past the checks of `Function.apply` for transforms of torch.func (private).

    They cost a call per argument, for each function and layer.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class _Accumulators(torch.autograd.Function):
    """Node whose edges lead to the accumulators of any number of leaves; one call costs less than one per leaf."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("the node only lists edges")


def accumulators(leaves: list[torch.Tensor]) -> list[Any]:
    """Returns the autograd nodes that accumulate into the gradients of leaves of any shape."""
    if not leaves:
        return []
    with torch.enable_grad():
        listed = run_function(_Accumulators, *leaves)
    return [node for node, _ in listed.grad_fn.next_functions]


def leaves_in_graphs(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the leaves, of any shape, that a graph may refer to: their accumulators hold them.

    `torch.utils.swap_tensors` asks in the same way (private).
    """
    return [leaf for leaf in leaves if leaf._use_count() > 1]  # type: ignore[attr-defined]


def backward_node(function: Any) -> Any:
    """Returns the class of the graph nodes that an autograd function creates (private)."""
    return function._backward_cls


def runs_all(node: Any) -> bool:
    """Returns, inside a backward, whether it runs this node; without `inputs=` it runs all nodes (private)."""
    return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]


def runs_any(nodes: Iterable[Any]) -> bool:
    """Returns, inside a backward, whether it runs one of these nodes (private); see `runs_all`."""
    return any(map(torch._C._will_engine_execute_node, nodes))  # type: ignore[attr-defined]


def is_asked_for(leaf: torch.Tensor) -> bool:
    """Returns, inside a backward, whether `torch.autograd.grad` requested the gradient of this leaf (private).

    `register_multi_grad_hook` queries the engine in the same way; for such a leaf the query raises an error.
    """
    try:
        torch._C._will_engine_execute_node(accumulator(leaf))  # type: ignore[attr-defined]
    except RuntimeError:
        return True
    return False


def writes_to(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors of any shape that an operator writes to (`_schema`, private)."""
    written = []  # type: ignore[var-annotated]
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in written if tensor is not None]


def changes_shape_in_place(func: Any) -> bool:
    """Returns whether an operator, such as `t_`, changes a tensor's shape, strides or memory but not its entries."""
    return torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default


def step_hook_last(optimizer: Any, handle: Any) -> None:
    """Moves a step pre-hook of an optimizer after all others (private)."""
    hooks = optimizer._optimizer_step_pre_hooks
    hooks[handle.id] = hooks.pop(handle.id)


def switch_mean_to_sum(func: Any, args: tuple) -> tuple | None:
    """Returns a loss backward's arguments with the reduction changed from mean to sum; `None` for other reductions.

    The enum values are from `torch.nn.functional._Reduction`, private.
    """
    place = [argument.name for argument in func._schema.arguments].index("reduction")
    if len(args) <= place or args[place] != 1:
        return None
    return (*args[:place], 2, *args[place + 1 :])


def draws_numbers(func: Any) -> bool:
    """Returns whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def returns_view(func: Any) -> bool:
    """Returns whether an operator returns views of its first argument (`_schema`, private)."""
    aliases = [value.alias_info for value in func._schema.returns if value.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def is_functional(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of any shape is a wrapper inside a `torch.func` transform (private)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def recompute_layers(model: Any) -> None:
    """Enables recomputation of a model's layers (`gradient_checkpointing_enable` until transformers 5.22)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def reentrant_checkpoints(layer: Any) -> bool:
    """Returns whether a layer is recomputed with torch's reentrant checkpointing."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant"))


def splits_python_functions() -> bool:
    """Returns whether `backward_weights` can start from an autograd `Function` (not in torch 2.11; 2.12 untested)."""
    return _minor(torch.__version__) >= (2, 13)


def detachable(tensor: torch.Tensor) -> torch.Tensor:
    """Clones views and leaves of any shape, because `backward_inputs` detaches its inputs in place.

    Views cannot be detached in place; a detached leaf that is passed on would not require grad when layers are
    recomputed later.
    """
    return tensor.clone() if tensor._is_view() or (tensor.is_leaf and tensor.requires_grad) else tensor


def gradient_hooks(parameter: torch.Tensor) -> int:
    """Returns the number of gradient hooks of a parameter of any shape (private)."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


@contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Disables the gradient hooks of parameters inside (private)."""
    saved_hooks = [
        (hooks, dict(hooks))
        for p in parameters
        for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        if hooks
    ]
    for hooks, _ in saved_hooks:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in saved_hooks:
            hooks.update(before)


def is_reached(edge: tuple[Any, int]) -> bool:
    """Returns, inside a backward, whether it continues to a tensor rather than only computing other gradients.

    Args:
        edge: an entry of `next_functions` (`_will_engine_execute_node`, private).
    """
    try:
        return torch._C._will_engine_execute_node(edge[0])
    except RuntimeError as error:
        # A leaf whose gradient `torch.autograd.grad` returns.
        if "leaf node" not in str(error):
            raise
        return True


def keeps_graph() -> bool:
    """Returns, inside a backward, whether the graph is retained (private)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def global_forward_hooks() -> tuple[Callable[..., Any], ...]:
    """Returns the forward hooks registered for all modules (private)."""
    from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

    return (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values())


def has_global_backward_hooks() -> bool:
    """Returns whether backward hooks are registered for all modules (private)."""
    from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks

    return bool(_global_backward_hooks or _global_backward_pre_hooks)


def inherit_forward(subclass: type) -> None:
    """Removes the copied `forward` of a class without its own, so that calls resolve to the bases' current forward.

    transformers wraps the forward of each layer subclass when the subclass is created (`GradientCheckpointingLayer`).
    """
    if "forward" in vars(subclass):
        del subclass.forward  # type: ignore[attr-defined]


@contextmanager
def around_all_modules(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Calls one function before and one after the forwards of all modules inside the context."""
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def dispatch_modes() -> list[Any]:
    """Returns the active dispatch modes (private)."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Disables dispatch modes inside (private)."""
    from torch.utils._python_dispatch import _disable_current_modes

    return cast(AbstractContextManager[Any], _disable_current_modes())


@contextmanager
def left_inference_mode() -> Iterator[None]:
    """Replaces inference mode, if active, by `no_grad` inside the context."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def recording_autograd_in_operator() -> Iterator[None]:
    """Records autograd graphs inside of a custom operator's implementation, which runs below autograd (private)."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("ADInplaceOrView", "AutogradOther", "AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradHPU"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield

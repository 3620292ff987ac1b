"""Private symbols of torch's autograd, dispatch modes and module hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

from .versions import _minor


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


def is_functional(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of any shape stands for another one inside of a `torch.func` transform (private)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def recompute_layers(model: Any) -> None:
    """Has backward compute a model's layers again (`gradient_checkpointing_enable` until transformers 5.22)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def reentrant_checkpoints(layer: Any) -> bool:
    """Tells whether backward computes a layer again by torch's reentrant checkpoints."""
    function = getattr(layer, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant"))


def splits_python_functions() -> bool:
    """Tells whether `backward_weights` can start from an autograd `Function` (not in torch 2.11; 2.12 untried)."""
    return _minor(torch.__version__) >= (2, 13)


def detachable(tensor: torch.Tensor) -> torch.Tensor:
    """Copies views and leaves of any shape: `backward_inputs` cuts the graph off in place.

    Views do not allow that; a leaf that is passed on would need no gradient where layers are recomputed afterwards.
    """
    return tensor.clone() if tensor._is_view() or (tensor.is_leaf and tensor.requires_grad) else tensor


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


def global_forward_hooks() -> tuple[Callable[..., Any], ...]:
    """Lists the forward hooks that were registered with all modules (private in torch 2.11 to 2.13)."""
    from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

    return (*_global_forward_pre_hooks.values(), *_global_forward_hooks.values())


def has_global_backward_hooks() -> bool:
    """Tells whether backward hooks were registered with all modules (private in torch 2.11 to 2.13)."""
    from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks

    return bool(_global_backward_hooks or _global_backward_pre_hooks)


def follow_forward_of_bases(made: type) -> None:
    """Has a class that adds none of its own run the forward that its bases have at the time of a call.

    transformers wraps the forward of each subclass of a layer as the subclass is made (`GradientCheckpointingLayer`).
    """
    if "forward" in vars(made):
        del made.forward  # type: ignore[attr-defined]


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


def dispatch_modes() -> list[Any]:
    """Lists the modes that see operations on tensors now (private in torch 2.11 to 2.13)."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Keeps modes from seeing operations on tensors inside (private in torch 2.11 to 2.13)."""
    from torch.utils._python_dispatch import _disable_current_modes

    return cast(AbstractContextManager[Any], _disable_current_modes())


@contextmanager
def left_inference_mode() -> Iterator[None]:
    """Computes without gradients in the place of inference mode, where that is on."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield

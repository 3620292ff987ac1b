"""Forward hooks of users in a model whose layers are split: they are given whole tensors, or refused by name.

A hook sees what its module's caller sees: a pre-hook runs before, a forward hook after everything that this library
does to the module's hidden states. In between a tensor is whole on every rank (`forms.py`), so that means, norms
and directions are one process's, and so are gradients that hooks read or change. All of that is paid for by modules
that have hooks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...compat.shard_safe import is_marked, is_of_checked_library, origin, shard_safe, should_run_last
from ...compat.torch_autograd import global_forward_hooks, leave_uncompiled
from ...core.communication.rng import TensorParallelRng
from ...core.forward_hooks import ForwardHooks
from ...errors import UnsupportedError
from ..attention_heads import LocalArguments
from .module_calls import CallsInHooks
from .module_layouts import Activations, Forms, unknown
from .replaced_functions import follow_names
from .tensor_layouts import WHOLE, Form, Tokens, change_input, change_output

_GIVEN_TO = "_hf_megatron_given_to"


class _Opened:
    """The whole of the hidden states that a module is called with, while a hook has it."""

    def __init__(self, form: Form, args: tuple, kwargs: dict[str, Any], hook: str):
        self.form = form
        self.part: Any = None
        self.unsharded: Any = None
        self.call = change_input(args, kwargs, self._open)
        self.version = None if self.unsharded is None else self.unsharded._version
        if self.unsharded is not self.part and self.unsharded.requires_grad:
            setattr(self.unsharded, _GIVEN_TO, hook)

    def _open(self, part: Tensor) -> Tensor:
        self.part, self.unsharded = part, self.form.open(part)
        return self.unsharded

    def was_edited(self) -> bool:
        return self.unsharded is not self.part and self.unsharded._version != self.version

    def reject_gradient_hooks(self, hook: str) -> None:
        """Raises `UnsupportedError` for hooks on the gradient of an input, which others than this module may read."""
        if self.unsharded is not self.part and (self.unsharded.retains_grad or self.unsharded._backward_hooks):
            raise UnsupportedError(
                f"{hook} asks for the gradient of an input, of which it has seen a copy. Hook the module that the "
                "input is the output of, or load the model with tp_size=1."
            )


def _reject_extra_shards(given: Form, hidden: Any, call: tuple, hook: str) -> None:
    """Raises `UnsupportedError` where a module is given more tensors of which a rank has its tokens."""
    if not isinstance(given, Tokens):
        return
    for tensor in (*call[0][1:], *call[1].values()):
        if isinstance(tensor, Tensor) and tensor is not hidden and tensor.dim() > 2 and given.holds(tensor):
            raise UnsupportedError(
                f"{hook} is given a tensor of shape {tuple(tensor.shape)} beside the hidden states, of which each "
                "rank has its tokens. Hook another module, mark the hook with hf_megatron.shard_safe if a part is "
                "enough, or set sequence_parallel=False."
            )


def reject_hook_inputs(tensors: Iterable[Any]) -> None:
    """Raises `UnsupportedError` if the gradient by what a hook was given of an input is asked for."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (hook := vars(tensor).get(_GIVEN_TO)) is not None:
            raise UnsupportedError(
                f"The gradient by an input that was given to a hook ({hook}): it has seen a copy. Take it by the "
                "output of the module that the input comes from, or load the model with tp_size=1."
            )


class _Before:
    """A forward pre-hook that is given the whole of a module's input."""

    def __init__(self, hook: Any, name: str, form: Form, streams: TensorParallelRng, calls: CallsInHooks):
        self.hook, self.name, self.form, self.streams, self.calls = hook, name, form, streams, calls
        _mark_identical(self, hook)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        opened = _Opened(self.form, args, kwargs or {}, self.name)
        _reject_extra_shards(self.form, opened.unsharded, opened.call, self.name)
        with self.streams.replicated(), self.calls.guarded(self.name):
            result = self.hook(module, *(opened.call[:1] if kwargs is None else opened.call))
        opened.reject_gradient_hooks(self.name)
        if opened.was_edited():
            # Whoever else reads the tensor, as the residual does a norm's input, sees an edit in place too.
            opened.part.copy_(self.form.close(opened.unsharded))
            if result is None:
                return None
        if kwargs is None:
            result = opened.call[0] if result is None else result
            return change_input(result if isinstance(result, tuple) else (result,), {}, self.form.close)[0]
        given, named = opened.call if result is None else result
        return change_input(given, named, self.form.close)


class _After:
    """A forward hook that is given the whole of a module's input and output."""

    def __init__(self, hook: Any, name: str, forms: Forms, streams: TensorParallelRng, calls: CallsInHooks):
        self.hook, self.name, self.forms, self.streams, self.calls = hook, name, forms, streams, calls
        _mark_identical(self, hook)

    def __call__(self, module: nn.Module, args: tuple, *rest: Any) -> Any:
        *kwargs, output = rest
        if output is None:
            # After an error: other ranks may not come here.
            return self.hook(module, args, *rest)
        inside: Any = self.forms.inside
        returned: Any = self.forms.returned
        maps: Any = self.forms.maps
        given: Any = self.forms.given
        opened = _Opened(inside, args, kwargs[0] if kwargs else {}, self.name)
        _reject_extra_shards(given, opened.unsharded, opened.call, self.name)
        unsharded = change_output(output, returned.open, maps and maps.open)
        with self.streams.replicated(), self.calls.guarded(self.name):
            result = self.hook(module, *opened.call[: 1 + len(kwargs)], unsharded)
        opened.reject_gradient_hooks(self.name)
        return change_output(unsharded if result is None else result, returned.close, maps and maps.close)


class UserHooks:
    """Looks at a model's modules before each of its forwards, for hooks that were registered since it was laid out.

    A deep copy has hooks, and modules, of its own.

    Args:
        modules: by name, of those that are split or lie in a layer.
        first (`int`): the first hook that tensor parallelism itself has registered.
    """

    def __init__(
        self,
        activations: Activations,
        streams: TensorParallelRng,
        calls: CallsInHooks,
        modules: dict[str, nn.Module],
        first: int,
    ):
        self.activations, self.streams, self.calls, self.modules, self.first = (
            activations,
            streams,
            calls,
            modules,
            first,
        )
        self.end = first
        self.seen: set[int] = set()
        self.wrapped: dict[str, nn.Module] = {}

    def install(self, hooks: ForwardHooks, *models: nn.Module) -> None:
        """Checks for hooks of users in each call of these models; `hooks` is the table of one of them."""
        for model in models:
            hooks.add_to(model, "user hooks", self._enter)
        # Hooks are counted up over all modules: the user's come after the last of these.
        self.end = RemovableHandle.next_id

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Takes modules that were put around others, or in their place, for those that were laid out, by name."""
        for name, module in modules.items():
            before = self.wrapped.pop(name, self.modules.get(name))
            if before is not None and before is not module:
                self.wrapped[name] = before
        follow_names(self.modules, modules)

    def _forms(self, name: str, module: nn.Module) -> Forms:
        """Returns the forms of a module; around another one they are that one's, and beside it nobody's."""
        for outer, before in self.wrapped.items():
            if name == outer or module is before:
                return self.activations.of(outer, before)
            if name.startswith(f"{outer}."):
                return unknown("an adapter's factors see parts of its linear's tensors")
        return self.activations.of(name, module)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for hook in global_forward_hooks():
            if not is_marked(hook) and not is_of_checked_library(hook):
                raise UnsupportedError(
                    f"A forward hook of all modules ({_name_of(hook)}): in a split model most of them see a part of a "
                    "tensor. Register it with modules, mark it with hf_megatron.shard_safe if parts are enough, or "
                    "load the model with tp_size=1."
                )
        for name, module in self.modules.items():
            if module._forward_pre_hooks and self._are_new(module._forward_pre_hooks):
                self._give_inputs(name, module)
            if module._forward_hooks and self._are_new(module._forward_hooks):
                self._give_outputs(name, module)

    def _are_new(self, hooks: dict[int, Any]) -> bool:
        return any(number >= self.end and number not in self.seen for number in hooks)

    def _users(self, hooks: dict[int, Any]) -> list[int]:
        return [n for n, hook in hooks.items() if n in self.seen or (n >= self.end and not _is_of_libraries(hook))]

    def _give_inputs(self, name: str, module: nn.Module) -> None:
        hooks: Any = module._forward_pre_hooks
        form, users = self._forms(name, module).given, self._users(hooks)
        for number in users:
            if number not in self.seen and (form is WHOLE or not is_marked(hooks[number])):
                what = f"A forward pre-hook of {name} ({type(module).__name__})"
                hooks[number] = _Before(hooks[number], what, _require(form, what), self.streams, self.calls)
        self.seen.update(users)
        # Before this library's, and behind those of FSDP2, which has the weights put together.
        numbers = list(hooks)
        own = next((n for n, number in enumerate(numbers) if self.first <= number < self.end), len(numbers))
        for number in [number for number in numbers[own:] if number not in users]:
            hooks.move_to_end(number)

    def _give_outputs(self, name: str, module: nn.Module) -> None:
        hooks: Any = module._forward_hooks
        forms, users = self._forms(name, module), self._users(hooks)
        is_replicated = forms.inside is WHOLE and forms.returned is WHOLE and forms.maps is None
        for number in users:
            if number not in self.seen and (is_replicated or not is_marked(hooks[number])):
                what = f"A forward hook of {name} ({type(module).__name__})"
                for form in (forms.inside, forms.returned):
                    _require(form, what)
                if number in module._forward_hooks_with_kwargs:
                    _reject_split_arguments(module, what)
                hooks[number] = _After(hooks[number], what, forms, self.streams, self.calls)
        self.seen.update(users)
        # Behind this library's; what transformers records with, from the first forward on, and tools that look at what
        # a module returned come where they were put.
        for number in [n for n in hooks if n in users or (n >= self.end and _is_of_a_library(hooks[n]))]:
            hooks.move_to_end(number)


def _is_of_a_library(hook: Any) -> bool:
    return is_of_checked_library(hook) or should_run_last(hook)


def _mark_identical(wrapper: Any, hook: Any) -> None:
    """Has other axes know what a hook was said to work on."""
    if is_marked(hook):
        shard_safe(wrapper)


def _reject_split_arguments(module: nn.Module, hook: str) -> None:
    cut = [getattr(other, "__self__", None) for other in module._forward_pre_hooks.values()]
    names = [name for arguments in cut if isinstance(arguments, LocalArguments) for name in arguments.names]
    if names:
        raise UnsupportedError(
            f"{hook} is given {', '.join(names)} of this rank's heads with tp_size > 1. Register it without "
            "with_kwargs, or mark it with hf_megatron.shard_safe if a part is enough."
        )


def _require(form: Form | str, hook: str) -> Form:
    if isinstance(form, str):
        raise UnsupportedError(
            f"{hook}: with tp_size > 1 {form}. Hook a linear, the whole block or the layer, mark the hook with "
            "hf_megatron.shard_safe if a part is enough, or load the model with tp_size=1."
        )
    return form


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _is_of_libraries(hook: Any) -> bool:
    """Tells whether a hook stands where it belongs: other axes' of this library, and those of checked ones."""
    return is_of_checked_library(hook) or origin(hook) == __name__.partition(".")[0]

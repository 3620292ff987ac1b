"""User forward hooks in a model whose layers are sharded: they see full tensors, or are rejected by name.

A hook sees what its module's caller sees: a pre-hook runs before, a forward hook after everything that this library
does to the module's hidden states. In between a tensor is full on every rank (`tensor_layouts.py`), so that means,
norms and directions match the single-process run, and so do gradients that hooks read or change. Only modules with
hooks pay for this.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...compat.shard_safe import is_from_checked_library, is_marked, origin, shard_safe, should_run_last
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
    """Full hidden states of a module's call, while a hook has them."""

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
        """Raises `UnsupportedError` for hooks on the gradient of an input, which other modules may read as well."""
        if self.unsharded is not self.part and (self.unsharded.retains_grad or self.unsharded._backward_hooks):
            raise UnsupportedError(
                f"{hook} requests the gradient of an input, but it received a copy. Hook the module that "
                "computes the input, or load the model with tp_size=1."
            )


def _reject_extra_shards(form: Form, hidden: Any, call: tuple, hook: str) -> None:
    """Raises `UnsupportedError` if a module is called with further tensors that hold the rank's tokens only."""
    if not isinstance(form, Tokens):
        return
    for tensor in (*call[0][1:], *call[1].values()):
        if isinstance(tensor, Tensor) and tensor is not hidden and tensor.dim() > 2 and form.holds(tensor):
            raise UnsupportedError(
                f"{hook} would receive only this rank's tokens of a tensor of shape {tuple(tensor.shape)}, in addition "
                "to the hidden states. Hook another module, mark the hook with hf_megatron.shard_safe if a shard is "
                "enough, or set sequence_parallel=False."
            )


def reject_hook_inputs(tensors: Iterable[Any]) -> None:
    """Raises `UnsupportedError` if a gradient with respect to the full input that a hook was given is requested."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (hook := vars(tensor).get(_GIVEN_TO)) is not None:
            raise UnsupportedError(
                f"Gradient with respect to an input that was passed to a hook ({hook}): the hook received a copy. "
                "Use the output of the module that computes the input, or load the model with tp_size=1."
            )


class _Before:
    """Forward pre-hook that passes the full input of a module to a user's hook."""

    def __init__(self, hook: Any, name: str, form: Form, rng: TensorParallelRng, calls: CallsInHooks):
        self.hook, self.name, self.form, self.rng, self.calls = hook, name, form, rng, calls
        _mark_identical(self, hook)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        # Gathered: [batch, sequence / tp, ...] or [..., features / tp] -> full.
        opened = _Opened(self.form, args, kwargs or {}, self.name)
        _reject_extra_shards(self.form, opened.unsharded, opened.call, self.name)
        # All ranks run the hook on the same tensor, so random numbers come from the shared RNG state.
        with self.rng.replicated(), self.calls.guarded(self.name):
            result = self.hook(module, *(opened.call[:1] if kwargs is None else opened.call))
        opened.reject_gradient_hooks(self.name)
        if opened.was_edited():
            # Copy an in-place edit back: other readers of the tensor, such as the residual branch, have to see it too.
            opened.part.copy_(self.form.close(opened.unsharded))
            if result is None:
                return None
        # Split again: the module gets the local shard.
        if kwargs is None:
            result = opened.call[0] if result is None else result
            return change_input(result if isinstance(result, tuple) else (result,), {}, self.form.close)[0]
        new_args, named = opened.call if result is None else result
        return change_input(new_args, named, self.form.close)


class _After:
    """Forward hook that passes the full input and output of a module to a user's hook."""

    def __init__(self, hook: Any, name: str, forms: Forms, rng: TensorParallelRng, calls: CallsInHooks):
        self.hook, self.name, self.forms, self.rng, self.calls = hook, name, forms, rng, calls
        _mark_identical(self, hook)

    def __call__(self, module: nn.Module, args: tuple, *rest: Any) -> Any:
        *kwargs, output = rest
        if output is None:
            # After an error: other ranks may not reach this hook, so no collective runs.
            return self.hook(module, args, *rest)
        inside: Any = self.forms.inside
        returned: Any = self.forms.returned
        maps: Any = self.forms.maps
        input_form: Any = self.forms.given
        opened = _Opened(inside, args, kwargs[0] if kwargs else {}, self.name)
        _reject_extra_shards(input_form, opened.unsharded, opened.call, self.name)
        # Gather the output, run the hook on all ranks, split its result again.
        full_output = change_output(output, returned.open, maps and maps.open)
        with self.rng.replicated(), self.calls.guarded(self.name):
            result = self.hook(module, *opened.call[: 1 + len(kwargs)], full_output)
        opened.reject_gradient_hooks(self.name)
        return change_output(full_output if result is None else result, returned.close, maps and maps.close)


class UserHooks:
    """Checks a model's modules before each forward for user hooks that were registered after it was parallelized.

    A deep copy has its own hooks and modules.

    Args:
        modules: by name, those that are sharded or belong to a layer.
        first (`int`): id of the first hook that tensor parallelism itself registered.
    """

    def __init__(
        self,
        activations: Activations,
        rng: TensorParallelRng,
        calls: CallsInHooks,
        modules: dict[str, nn.Module],
        first: int,
    ):
        self.activations, self.rng, self.calls, self.modules, self.first = (
            activations,
            rng,
            calls,
            modules,
            first,
        )
        self.end = first
        self.seen: set[int] = set()
        self.wrapped: dict[str, nn.Module] = {}
        self._checked: tuple | None = None

    def install(self, hooks: ForwardHooks, *models: nn.Module) -> None:
        """Registers the check for calls of `models`; `hooks` is the hook table of one of them."""
        for model in models:
            hooks.add_to(model, "user hooks", self._enter)
        # Hook ids increase over all modules: user hooks have later ids than the last of these.
        self.end = RemovableHandle.next_id

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Tracks modules that wrap or replace the parallelized ones, by name."""
        for name, module in modules.items():
            before = self.wrapped.pop(name, self.modules.get(name))
            if before is not None and before is not module:
                self.wrapped[name] = before
        follow_names(self.modules, modules)
        self._checked = None

    def _forms(self, name: str, module: nn.Module) -> Forms:
        """Returns a module's layouts; a wrapper has the layouts of the module inside, an adapter's own modules none."""
        for outer, before in self.wrapped.items():
            if name == outer or module is before:
                return self.activations.of(outer, before)
            if name.startswith(f"{outer}."):
                return unknown("an adapter's factors receive shards of its linear's tensors")
        return self.activations.of(name, module)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for hook in global_forward_hooks():
            if not is_marked(hook) and not is_from_checked_library(hook):
                raise UnsupportedError(
                    f"A global forward hook ({_name_of(hook)}) would receive shards in most modules of a "
                    "tensor-parallel model. Register it on single modules, mark it with hf_megatron.shard_safe if "
                    "shards are enough, or load the model with tp_size=1."
                )
        # Ids of hooks increase over all modules of the process: without new ones, all hooks were seen before.
        newest = (RemovableHandle.next_id, len(self.modules), *map(id, self.wrapped.values()))
        if newest == self._checked:
            return
        for name, module in self.modules.items():
            if module._forward_pre_hooks and self._are_new(module._forward_pre_hooks):
                self._give_inputs(name, module)
            if module._forward_hooks and self._are_new(module._forward_hooks):
                self._give_outputs(name, module)
        self._checked = newest

    def _are_new(self, hooks: dict[int, Any]) -> bool:
        return any(number >= self.end and number not in self.seen for number in hooks)

    def _users(self, hooks: dict[int, Any]) -> list[int]:
        return [n for n, hook in hooks.items() if n in self.seen or (n >= self.end and not _is_library_hook(hook))]

    def _give_inputs(self, name: str, module: nn.Module) -> None:
        hooks: Any = module._forward_pre_hooks
        form, users = self._forms(name, module).given, self._users(hooks)
        # Only hooks that are not wrapped yet; marked ones get the shard.
        for number in users:
            if number not in self.seen and (form is WHOLE or not is_marked(hooks[number])):
                what = f"A forward pre-hook of {name} ({type(module).__name__})"
                hooks[number] = _Before(hooks[number], what, _require(form, what), self.rng, self.calls)
        self.seen.update(users)
        # Before this library's hooks, and after FSDP2's, which unshard the weights.
        hook_ids = list(hooks)
        insert_at = next((n for n, number in enumerate(hook_ids) if self.first <= number < self.end), len(hook_ids))
        for number in [number for number in hook_ids[insert_at:] if number not in users]:
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
                hooks[number] = _After(hooks[number], what, forms, self.rng, self.calls)
        self.seen.update(users)
        # After this library's hooks. Hooks of libraries that record outputs (transformers' are registered in the first
        # forward) keep their order relative to user hooks.
        for number in [n for n in hooks if n in users or (n >= self.end and _is_checked_or_last(hooks[n]))]:
            hooks.move_to_end(number)


def _is_checked_or_last(hook: Any) -> bool:
    return is_from_checked_library(hook) or should_run_last(hook)


def _mark_identical(wrapper: Any, hook: Any) -> None:
    """Copies a hook's `shard_safe` mark to its wrapper, which other axes check."""
    if is_marked(hook):
        shard_safe(wrapper)


def _reject_split_arguments(module: nn.Module, hook: str) -> None:
    cut = [getattr(other, "__self__", None) for other in module._forward_pre_hooks.values()]
    names = [name for arguments in cut if isinstance(arguments, LocalArguments) for name in arguments.names]
    if names:
        raise UnsupportedError(
            f"{hook} would receive {', '.join(names)} of this rank's heads only with tp_size > 1. Register it without "
            "with_kwargs, or mark it with hf_megatron.shard_safe if a shard is enough."
        )


def _require(form: Form | str, hook: str) -> Form:
    if isinstance(form, str):
        raise UnsupportedError(
            f"{hook}: with tp_size > 1 {form}. Hook a linear, the complete block or the layer, mark the hook with "
            "hf_megatron.shard_safe if a shard is enough, or load the model with tp_size=1."
        )
    return form


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _is_library_hook(hook: Any) -> bool:
    """Returns whether a hook keeps its position: it comes from another axis of this library or a checked library."""
    return is_from_checked_library(hook) or origin(hook) == __name__.partition(".")[0]

"""Placeholder for a module of another pipeline stage: has its names, shapes and dtypes, without values."""

from collections.abc import Callable, Collection, Iterator
from functools import cache
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import inherit_forward
from ..compat.torch_modules import get_surrounding, surround
from ..core.off_stage import OffStageModule, OffStageTensor, Owner, as_parameter
from ..errors import UnsupportedError

# Methods that transformers calls on submodules during loading.
_ACCESSORS = ("get_input_embeddings", "get_output_embeddings")
# Config objects that models read from their submodules.
_CONFIGS = ("config", "generation_config")


class OffRankShard(UnsupportedError, AttributeError):
    """Access to an attribute of a module on another stage; `hasattr` returns False."""


class Progress(Protocol):
    """Loading progress of a model, read by its placeholders.

    Attributes:
        is_filled: whether the weights are loaded; until then, placeholders show no weights, so that no loader looks for
            them.
        owner: engine of the model, after its weights are loaded.
    """

    is_filled: bool
    owner: Owner | None


class Placeholder(OffStageModule, nn.Module):
    """Placeholder for an off-stage module: has its class, plain attributes, names and parameters without values.

    Args:
        module (`nn.Module`): the original module, on the meta device.
        place (`str`): its stage, in words for error messages.
        progress (`Progress`): loading progress of the model.
    """

    # `kernels` replaces the forward of modules for which this returns True.
    kernel_condition = staticmethod(lambda module: False)

    is_off_stage = True

    def __init__(self, module: nn.Module, place: str, progress: Progress):
        super().__init__()
        self._kind, self._place, self._progress = type(module), place, progress
        self._own_class = type(self)
        vars(self).update({name: value for name, value in vars(module).items() if _is_plain(name, value)})
        self._parts = {name: self._part(name, child) for name, child in module.named_children()}
        parts = tuple(f"{name}." for name in self._parts)
        named = module.state_dict()
        self._weights = {name: tensor.to("meta") for name, tensor in named.items() if not name.startswith(parts)}
        self._unsaved = {name: b.to("meta") for name, b in module.named_buffers(recurse=False) if name not in named}
        self._trained = {name: p.requires_grad for name, p in module.named_parameters(recurse=False)}
        self._left_out = [name for name, parameter in module._parameters.items() if parameter is None]
        self._dtype = first_dtype(module)
        # Follows the model's dtype and device.
        self.register_buffer("_follower", torch.empty(0, dtype=self._dtype), persistent=False)

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_weights", {})
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in known:
                # During loading, a parent module may initialize the weights: give it the meta tensor.
                return self._off_stage(known[name]) if self._progress.is_filled else known[name]
            if name.startswith("_") or "_place" not in self.__dict__:
                raise
            if name in _ACCESSORS and name in dir(self._kind):
                return MethodType(getattr(self._kind, name), self)
            if not self._progress.is_filled and name in (unfilled := {**self._parts, **self._unsaved}):
                return unfilled[name]
            raise self._off_rank_error(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter | nn.Module) and self._progress.is_filled:
            if value is self._parameters.get(name):
                return
            before = self._modules.get(name)
            # Only PEFT may wrap or unwrap a child: it does the same on every stage.
            if (
                before is None
                or not isinstance(value, nn.Module)
                or not (_is_mixed_into(value, before) or _is_mixed_into(before, value))
            ):
                raise self._off_rank_error(name)
        super().__setattr__(name, value)

    def _off_stage(self, weight: Tensor) -> OffStageTensor:
        follower = self.get_buffer("_follower")
        if weight.is_floating_point() and follower.dtype != self._dtype:
            weight = weight.to(follower.dtype)
        return OffStageTensor(weight, follower.device, self._place)

    def _off_rank_error(self, name: str) -> "OffRankShard":
        return OffRankShard(
            f"{name} of a {self._kind.__name__}: it {self._place}, and this rank has only the names, shapes and dtypes "
            "of its weights (model.state_dict()). Read or change it on the ranks of that stage, or load the model "
            "with pp_size=1."
        )

    def _part(self, name: str, child: nn.Module) -> "Placeholder":
        return Placeholder(child, self._place, self._progress)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is nothing to compile on this rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"A {self._kind.__name__} was called alone, but it {self._place}. Call the full model.")

    def hold_parts(self) -> None:
        """Registers the children's placeholders, on the present device."""
        device = self.get_buffer("_follower").device
        for name, part in self._parts.items():
            # Set directly: `add_module` rejects names of existing attributes.
            self._modules[name] = part.to(device)

    def hold_real(self, name: str, part: nn.Module) -> None:
        """Registers a child of the original module, which this rank holds too, instead of its placeholder."""
        del self._parts[name]
        self.add_module(name, part)

    def list_weights(self, names: Collection[str]) -> None:
        """Registers off-stage parameters, and the placeholders of all children.

        The placeholder gets the class of its module as a base class, so that user code finds it with `isinstance`.
        Before, it has another class, so that no loader initializes weights for it.

        Args:
            names: names of the parameters to register, relative to this module.
        """
        assert self._progress.owner is not None
        # The axes have installed their functions around layers before.
        enter, leave = get_surrounding(self)
        self.__class__ = _standing_class(self._own_class, self._kind)  # type: ignore[arg-type, assignment]
        if enter is not None or leave is not None:
            surround(self, enter, leave)
        self._parameters.update(dict.fromkeys(self._left_out))
        for name, requires_grad in self._trained.items():
            if name in names:
                weight = as_parameter(self._off_stage(self._weights[name]), self._progress.owner, requires_grad)
                self._parameters[name] = weight  # type: ignore[assignment]
        self.hold_parts()
        for part, child in self._parts.items():
            child.list_weights(names_in(part, names))

    def unfreeze(self) -> None:
        """Makes the off-stage parameters trainable, as the stock loader does with those that their class froze."""
        self._trained = {name: self._weights[name].is_floating_point() for name in self._trained}
        for part in self._parts.values():
            part.unfreeze()

    def __iter__(self) -> Iterator["Placeholder"]:
        if not issubclass(self._kind, nn.ModuleList | nn.Sequential):
            raise TypeError(f"'{self._kind.__name__}' object is not iterable")
        return iter(self._parts.values())

    def resize_weight(self, name: str, shape: torch.Size) -> None:
        """Replaces an off-stage parameter by one of another `shape`."""
        old = self._parameters[name]
        assert old is not None and self._progress.owner is not None
        self._weights[name] = self._weights[name].new_empty(shape)
        weight = as_parameter(self._off_stage(self._weights[name]), self._progress.owner, old.requires_grad)
        self._parameters[name] = weight  # type: ignore[assignment]

    def share_weight(self, name: str, parameter: nn.Parameter) -> None:
        """Registers a tied parameter, of any shape, that another module of this rank has."""
        self._parameters[name] = parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Placeholder":
        """Moves and casts the off-stage parameters as the module would."""
        listed, self._parameters = self._parameters, {}
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters = listed
        for name, weight in listed.items():
            if isinstance(weight, OffStageTensor):
                weight.data = self._off_stage(self._weights[name])
        return self

    def list_around(self, wrapper: nn.Module) -> None:
        """Replaces the parameters of a module that wraps this one by off-stage ones."""
        assert self._progress.owner is not None
        for module in wrapper.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, OffStageTensor):
                    weight = self._off_stage(parameter.detach().to("meta"))
                    module._parameters[name] = as_parameter(  # type: ignore[assignment]
                        weight, self._progress.owner, parameter.requires_grad
                    )

    def make_placeholder(self, module: nn.Module) -> "Placeholder":
        """Returns the placeholder for a module that replaces this one's module on the ranks that hold it."""
        return self._own_class(module, self._place, self._progress)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self._progress.is_filled:
            return
        for name, tensor in self._weights.items():
            listed = self._parameters.get(name) if keep_vars else None
            destination[prefix + name] = listed if isinstance(listed, OffStageTensor) else self._off_stage(tensor)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Reports the errors that a single-process model would report; there is nothing to load."""
        if not self._progress.is_filled:
            return
        for name, tensor in self._weights.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.extend([prefix + name] if strict else [])
            elif value.shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {value.shape} from checkpoint, the "
                    f"shape in current model is {tensor.shape}."
                )
        if strict:
            parts = tuple(f"{name}." for name, _ in self.named_children())
            names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
            surplus = [name for name in names if name not in self._weights and not name.startswith(parts)]
            unexpected_keys.extend(prefix + name for name in surplus)


def _is_mixed_into(wrapper: nn.Module, inner: nn.Module) -> bool:
    """Returns whether `wrapper` is a PEFT module around `inner`; PEFT wraps modules on every stage in the same way."""
    is_known = any(base.__module__.partition(".")[0] == "peft" for base in type(wrapper).__mro__)
    return is_known and any(module is inner for module in wrapper.modules())


@cache
def _standing_class(base: Any, kind: Any) -> type[nn.Module]:
    mixed = type(kind.__name__, (base, kind), {})
    inherit_forward(mixed)
    return mixed


def _is_plain(name: str, value: Any) -> bool:
    # Some sizes are 0-dim tensors (Inkling's projections).
    is_number = isinstance(value, Tensor) and value.dim() == 0 and not isinstance(value, nn.Parameter)
    is_plain = name in _CONFIGS or is_number or isinstance(value, str | int | float | bool | tuple | None)
    return is_plain and name != "training" and not name.startswith("_")


def first_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the dtype of a module's first parameter, else of its first buffer."""
    stack = [module]
    # A loop instead of `parameters()`: every call reads the dtypes of all layers.
    while stack:
        part = stack.pop()
        for parameter in part._parameters.values():
            if parameter is not None:
                return parameter.dtype
        stack.extend(filter(None, reversed(part._modules.values())))
    return next((buffer.dtype for buffer in module.buffers()), None)


def names_in(part: str, names: Collection[str]) -> set[str]:
    """Returns the names of weights that are inside the submodule `part`, relative to it."""
    prefix = f"{part}." if part else ""
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule of this name."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)

"""Switching of RNG streams, left out in forwards that draw no random numbers."""

import operator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..compat.shared import Shared
from ..core.communication.rng import TensorParallelRng
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError

# Forwards without a draw after which the streams are not switched.
_OBSERVED = 2
# Parts of the names of attributes that turn draws on in stock modules.
_RATES = ("drop", "jitter", "noise", "prob")
# Classes whose rate is named `p`.
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
# Packages whose modules and hooks draw as these attributes say.
_KNOWN_PACKAGES = {"accelerate", "builtins", "hf_megatron", "liger_kernel", "peft", "torch", "transformers", "typing"}


class DrawSettings:
    """What decides whether a model's forward draws: dropout rates, training modes, modules and forward hooks."""

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        # References are kept so that no other object gets the same identity.
        self._tables = [module._modules for module in modules]
        self._hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._children, self._num_hooks = self._current_children(), list(map(len, self._hooks))
        owners = [(vars(module), _find_draw_settings(module)) for module in modules]
        classes = {base for module in modules for base in type(module).__mro__ if base is not object}
        functions = [hook for hooks in self._hooks for hook in hooks.values()]
        # Code of a user may draw in some forwards only.
        self.are_known = all(map(_is_known, [*classes, *functions])) and not any("forward" in vars(m) for m in modules)
        configs = {id(config): config for module in modules if (config := vars(module).get("config")) is not None}
        owners += [(vars(config), _find_draw_settings(config)) for config in configs.values()]
        self._watched = [(values, name) for values, names in owners for name in names]
        self._values = self._current_values()

    def has_changed(self) -> bool:
        """Returns whether a setting has changed, a module was added or replaced, or a hook added or removed."""
        children = self._current_children()
        is_same = len(children) == len(self._children) and all(map(operator.is_, children, self._children))
        has_same_hooks = list(map(len, self._hooks)) == self._num_hooks
        return not (is_same and has_same_hooks) or self._current_values() != self._values

    def _current_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def _current_values(self) -> list[Any]:
        return [values.get(name) for values, name in self._watched]


def _is_known(value: Any) -> bool:
    """Returns whether a class or function belongs to a package whose draws follow from its settings."""
    while isinstance(value, partial):
        value = value.func
    return str(value.__module__).partition(".")[0] in _KNOWN_PACKAGES


def _find_draw_settings(owner: Any) -> list[str]:
    """Returns the attributes of a module or config that may turn draws on."""
    names = [
        name
        for name, value in vars(owner).items()
        if isinstance(value, int | float) and any(part in name for part in _RATES)
    ]
    names += ["p"] if isinstance(owner, _DROPOUTS) else []
    return [*names, "training"] if names else []


class RngObserver(Shared):
    """Leaves out the switching of a model's RNG streams while its forwards draw nothing.

    Most models train without dropout, where reading and seeding the generator around each block is wasted host time.
    Models with modules or hooks of a user always switch. Forwards are compared by the state of
    the generator before and after. A pipeline's forward restores the state after each microbatch, so it is not
    observed.
    """

    def __init__(self, rng: TensorParallelRng):
        self.rng = rng
        self._settings: DrawSettings | None = None
        self._without_draws = 0
        self._start: bytes | None = None

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the comparison around the model's forward, after the ranks have agreed on a state."""
        hooks.add("rng", self._enter, self._leave, always_exit=True)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._start = None
        if not model.training or torch.compiler.is_compiling():
            return
        if self._settings is None or self._settings.has_changed():
            self._settings, self._without_draws = DrawSettings(model), 0
        self._start = self.rng.get_signature()
        self.rng.is_idle = self._without_draws >= _OBSERVED and self._settings.are_known

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> None:
        # Recomputation in backward, and layers that are called alone, switch the streams.
        was_idle, self.rng.is_idle = self.rng.is_idle, False
        start, self._start = self._start, None
        if start is None or output is None:
            return
        if self.rng.get_signature() == start:
            self._without_draws += 1
            return
        self._without_draws = 0
        if was_idle:
            raise UnsupportedError(
                f"A forward of {type(model).__name__} drew random numbers without a dropout setting of a module or its "
                "config, after forwards that drew none. Call the model again: from now on each tensor-parallel rank "
                "draws its own."
            )

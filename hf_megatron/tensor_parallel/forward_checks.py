"""Checks around a model's forward: every parameter has a sharding, and no output is requested that is sharded."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core.forward_hooks import ForwardHooks
from ..core.off_stage import local_named_parameters
from ..core.quantized_weight import QuantizedWeight
from ..errors import PlanError, UnsupportedError


class ParameterCheck:
    """Checks that every parameter is sharded and loaded: after loading, and whenever parameters changed.

    Args:
        expected_names: names of the parameters that have a sharding.
        current (`Callable`): returns the list of the model's parameters; another list object after a change.
    """

    def __init__(self, expected_names: Container[str], current: Callable[[], Any]):
        self.expected_names, self.current = expected_names, current
        self._checked: Any = None

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the check in a model's table of hooks."""
        hooks.add("parameters", self._enter)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Walking the model in every forward would be slow; the engine makes another list when parameters changed.
        # A model is in evaluation mode after loading, and a loop that forgets `train()` trains it all the same.
        if (model.training or torch.is_grad_enabled()) and (parameters := self.current()) is not self._checked:
            self.check(model)
            self._checked = parameters

    def check(self, model: nn.Module) -> None:
        """Raises `PlanError` for a parameter without a sharding, or one that was not loaded as planned."""
        for name, parameter in local_named_parameters(model):
            if name not in self.expected_names:
                raise PlanError(
                    f"{name} was added after the model was parallelized and has no sharding. Add modules before "
                    "loading."
                )
            if not isinstance(parameter, DTensor | QuantizedWeight) or parameter.device.type == "meta":
                raise PlanError(
                    f"{name} was not sharded as planned: it is a {type(parameter).__name__} on {parameter.device}."
                )


class OutputChecks:
    """Rejects calls that request an output that exists only in shards.

    Args:
        reasons: name of the argument that requests an output -> why it is rejected, and what to do.
    """

    def __init__(self, reasons: Mapping[str, str]):
        self.reasons = reasons

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the check in a model's table of hooks."""
        hooks.add("outputs", self._enter)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        for name, reason in self.reasons.items():
            # An argument overrides the config's default.
            flag = kwargs.get(name)
            if flag or (flag is None and getattr(model.config, name, False)):
                raise UnsupportedError(f"{type(model).__name__}(..., {name}=True): {reason}")

"""Step hooks of optimizers that were not prepared: off-stage parameters and unreduced gradients."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..core.off_stage import is_off_stage
from ..core.runtime import RUNTIME
from ..errors import ConfigError
from .autograd_boundary import UNREDUCED, reject_untracked
from .engine import get_engine, get_reducer
from .model_parameters import MARK, reject_replaced

_LISTED = "_hf_megatron_listed"


def before_unprepared_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Removes off-stage parameters from an unprepared optimizer's groups for the step.

    Raises:
        ConfigError: if gradients are in buckets, where an unprepared optimizer does not find them, or if it holds
            parameters that were replaced.
        UnsupportedError: if it holds tensors whose gradients are not reduced, sums over parameters, or trains a model
            that a launched script has not parallelized.
    """
    if MARK in vars(optimizer):
        return
    if RUNTIME.launch is not None:
        RUNTIME.launch.check_step(optimizer)
    groups = optimizer.param_groups
    if any(is_off_stage(parameter) for group in groups for parameter in group["params"]):
        vars(optimizer)[_LISTED] = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if not is_off_stage(parameter)]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    reject_untracked(p for p in parameters if type(p) is Tensor and UNREDUCED in vars(p))
    # One parameter is enough to find the engine: an optimizer of a parallelized model has parameters of that model.
    first = parameters[0] if parameters else None
    engine = None if first is None else get_engine(first)
    if engine is not None:
        if engine.has_replaced:
            reject_replaced(optimizer, chain(*vars(optimizer).get(_LISTED, ()), parameters))
        engine.reject_sums_over_parameters(optimizer)
        engine.check_before_step()
    if first is not None and get_reducer(first) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} is not prepared for a data parallel model. Pass it through "
            "accelerator.prepare(...) or hf_megatron.prepare_optimizer(optimizer)."
        )


def after_unprepared_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Restores the off-stage parameters in an unprepared optimizer's groups."""
    listed = vars(optimizer).pop(_LISTED, ())
    for group, parameters in zip(optimizer.param_groups, listed, strict=bool(listed)):
        group["params"] = parameters

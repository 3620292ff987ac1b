"""Step hooks of optimizers that were not prepared: off-stage parameters, unreduced gradients, missing main params."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..core.off_stage import is_off_stage
from ..core.runtime import RUNTIME
from ..errors import ConfigError
from .autograd_boundary import UNREDUCED, reject_untracked
from .combined_optimizers import COMBINED
from .engine import get_engine, get_reducer
from .main_params import HALF
from .model_parameters import MARK, reject_replaced
from .optimizer_classes import is_elementwise, is_layer_wise

_LISTED = "_hf_megatron_listed"
# Attribute of the parameters of a stock model whose config asks for fp32 main params.
_EXPECTS_MAIN_PARAMS = "_hf_megatron_expects_main_params"
# Attribute of an optimizer whose parameters may be stepped on as they are.
_CHECKED = "_hf_megatron_checked"


def expect_main_params(parameters: Iterable[nn.Parameter]) -> None:
    """Marks the parameters of a job of one rank, whose optimizer is stock although the config has fp32 main params."""
    for parameter in parameters:
        setattr(parameter, _EXPECTS_MAIN_PARAMS, True)


def _require_main_params(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Raises `ConfigError` if a stock optimizer steps on half-precision parameters that should have main params."""
    if _CHECKED in vars(optimizer):
        return
    half = (p.dtype for p in parameters if p.dtype in HALF and p.requires_grad and _EXPECTS_MAIN_PARAMS in vars(p))
    if (dtype := next(half, None)) is not None:
        raise ConfigError(
            f"MegatronConfig.fp32_main_params = True, but the optimizer of a job of one rank is stock: "
            f"{type(optimizer).__name__} would keep weights and moments in {str(dtype).removeprefix('torch.')}. Load "
            "the model with dtype=torch.float32 and train with bf16=True or autocast, or set fp32_main_params=False, "
            "which is the stock optimizer on every layout."
        )
    vars(optimizer)[_CHECKED] = True


def before_unprepared_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Removes off-stage parameters from an unprepared optimizer's groups for the step.

    Raises:
        ConfigError: if gradients are in buckets, where an unprepared optimizer does not find them, if it holds
            parameters that were replaced, or if a job of one rank trains half-precision weights without fp32 main
            params.
        UnsupportedError: if it holds tensors whose gradients are not reduced, sums over parameters, or trains a model
            that a launched script has not parallelized.
    """
    if MARK in vars(optimizer) or COMBINED in vars(optimizer):
        return
    if RUNTIME.launch is not None:
        RUNTIME.launch.check_step(optimizer)
    groups = optimizer.param_groups
    listed = [parameter for group in groups for parameter in group["params"]]
    _require_main_params(optimizer, listed)
    if any(is_off_stage(parameter) for group in groups for parameter in group["params"]):
        vars(optimizer)[_LISTED] = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if not is_off_stage(parameter)]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    reject_untracked(p for p in parameters if type(p) is Tensor and UNREDUCED in vars(p))
    # One parameter is enough to find the engine: an optimizer of a parallelized model has parameters of that model. If
    # all are on other stages, this rank still takes part in checks before the step.
    first = parameters[0] if parameters else None
    engine = get_engine(listed[0] if first is None else first) if listed else None
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
    is_known = is_elementwise(type(optimizer)) or is_layer_wise(type(optimizer))
    if engine is not None and not is_known and any(map(engine.parameters.is_split, parameters)):
        RUNTIME.unprepared_step = type(optimizer).__name__


def after_unprepared_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Restores the off-stage parameters in an unprepared optimizer's groups."""
    RUNTIME.unprepared_step = None
    listed = vars(optimizer).pop(_LISTED, ())
    for group, parameters in zip(optimizer.param_groups, listed, strict=bool(listed)):
        group["params"] = parameters

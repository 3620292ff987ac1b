"""Fused kernels of other libraries: Liger's functions and settings by name, and the layers that `kernels` replaces."""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from types import MethodType
from typing import Any

from torch import nn

from .shard_safe import origin

_LIGER = "liger_kernel"
# Argument of Liger's forwards of models: `False` makes them call the head and `loss_function`.
SKIP_LOGITS = "skip_logits"


def liger_kernel_name(value: Any) -> str | None:
    """Returns the name of the function or module class of Liger that a function, method or class is, or `None`."""
    if value is None or origin(value) != _LIGER:
        return None
    function = value.__func__ if isinstance(value, MethodType) else value
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name).removesuffix(".forward")


def is_liger_head(forward: Any) -> bool:
    """Returns whether a model's forward is Liger's, which may compute the loss from the weight of the head."""
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    code = getattr(function, "__code__", None)
    return liger_kernel_name(function) is not None and code is not None and SKIP_LOGITS in code.co_varnames


def liger_defaults(model_type: str) -> Mapping[str, bool]:
    """Returns the settings of Liger's patches of a model type with their defaults; empty for types without patches."""
    if find_spec(_LIGER) is None:
        return {}
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return {}
    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters
    return {name: one.default for name, one in parameters.items() if isinstance(one.default, bool)}


def kernel_layer_name(module: nn.Module) -> str | None:
    """Returns the name under which `kernels` may replace the forward of a module, or `None`."""
    return getattr(type(module), "kernel_layer_name", None)

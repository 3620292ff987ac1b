"""Marks functions that are safe to run on a local shard of a tensor."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .versions import CHECKED

F = TypeVar("F", bound=Callable[..., Any])
_MARK, _LAST = "_hf_megatron_shard_safe", "_hf_megatron_runs_last"


def shard_safe(function: F) -> F:
    """Decorator: declares that `f(shard)` equals the matching shard of `f(full_tensor)`.

    In a parallelized model the function is then called with local shards: attention heads inside of attention,
    features inside of an MLP, tokens with sequence parallelism. Random numbers it draws are rank-local.

    Args:
        function (`Callable`): a forward hook, a module or its `forward`, an attention function; or a `loss_function`
            that consists of the mean of one of torch's losses over the labels. Decorate methods in their class.
    """
    setattr(function, _MARK, True)
    return function


def runs_last(function: F) -> F:
    """Decorator: declares that a forward hook is shard-safe and must see an output after all other hooks."""
    setattr(function, _LAST, True)
    return shard_safe(function)


def should_run_last(function: Any) -> bool:
    """Returns whether a hook must run after user hooks."""
    return getattr(function, _LAST, False)


def is_marked(function: Any) -> bool:
    """Returns whether a function is marked as shard-safe."""
    return getattr(function, _MARK, False)


def origin(function: Any) -> str:
    """Returns the name of the library that defines a function."""
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module.partition(".")[0])


def is_from_checked_library(function: Any) -> bool:
    """Returns whether a function is defined by a library with checked versions."""
    return origin(function) in CHECKED

"""Functions of which it is known that they may be given a part of a tensor by itself."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .versions import CHECKED

F = TypeVar("F", bound=Callable[..., Any])
_MARK, _LAST = "_hf_megatron_works_on_parts", "_hf_megatron_comes_last"


def shard_safe(function: F) -> F:
    """Says that what a function makes of a part of a tensor is that part of what it makes of the whole; a decorator.

    Of a laid out model it is then given what this rank has: inside of attention heads, inside of an MLP features, with
    sequence parallelism tokens. Random numbers that it draws are those of the rank.

    Args:
        function (`Callable`): a forward hook, a module or its `forward`, an attention function; or a `loss_function`,
            all of which is the mean of one of torch's losses over the labels. Methods are marked in their class.
    """
    setattr(function, _MARK, True)
    return function


def runs_last(function: F) -> F:
    """Says that a forward hook looks at what all others have made of an output, and works on parts; a decorator."""
    setattr(function, _LAST, True)
    return shard_safe(function)


def should_run_last(function: Any) -> bool:
    """Tells whether a hook was said to come behind those of users."""
    return getattr(function, _LAST, False)


def is_marked(function: Any) -> bool:
    """Tells whether a function was said to work on parts."""
    return getattr(function, _MARK, False)


def origin(function: Any) -> str:
    """Names the library that defined a function."""
    while isinstance(function, partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module.partition(".")[0])


def is_of_checked_library(function: Any) -> bool:
    """Tells whether a function was defined by a library whose versions this one was compared with."""
    return origin(function) in CHECKED

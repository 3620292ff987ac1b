"""Access to the hidden states in a block's arguments and outputs."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedError

HIDDEN_STATES = "hidden_states"


def replace_input(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], change: Callable[[Tensor], Any], *, of_block: bool = True
) -> tuple[tuple, dict[str, Any]]:
    """Applies `change` to the hidden states in a block's call: its first argument or `hidden_states=`.

    Further positional arguments of a block may be the same tensor, from which queries, keys and values are computed
    separately; they are replaced too. Arguments of a layer (`of_block=False`) have their own rules.
    """
    if args and isinstance(first := args[0], Tensor):
        changed = change(first)
        if len(args) == 1:
            return (changed,), kwargs
        others = [changed if value is first else value for value in args[1:]] if of_block else args[1:]
        return (changed, *others), kwargs
    if isinstance(first := kwargs.get(HIDDEN_STATES), Tensor):
        return args, {**kwargs, HIDDEN_STATES: change(first)}
    # A forward may name its first parameter differently.
    states = None if args else kwargs.get(next(iter(inspect.signature(module.forward).parameters)))
    if isinstance(states, Tensor):
        changed = change(states)
        return args, {name: changed if value is states else value for name, value in kwargs.items()}
    raise UnsupportedError(
        "A sharded block was called without hidden states as its first argument or `hidden_states=`; its family needs "
        "a spec of its own (see CONTRIBUTING.md)."
    )


def replace_output(output: Any, change: Callable[[Tensor], Any]) -> Any:
    """Applies `change` to a block's returned hidden states, alone or first in a tuple; else `UnsupportedError`."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list) and isinstance(output[0], Tensor):
        # Further outputs, such as attention weights, are not changed.
        return type(output)((change(output[0]), *output[1:]))
    raise UnsupportedError(f"A sharded block returned {type(output).__name__}, expected a tensor or a tuple of them.")

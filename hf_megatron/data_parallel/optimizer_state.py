"""Optimizer state that can be looked up by model parameter or by main param."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def has_tensors(state: Mapping[str, Any]) -> bool:
    """Returns whether the state of a parameter has tensors other than scalars."""
    return any(isinstance(value, Tensor) and value.dim() for value in state.values())


def has_stepped(state: Mapping[str, Any]) -> bool:
    """Returns whether the state of a parameter is that of a stepped optimizer.

    Adagrad creates state with `step` 0 in its constructor, and Moonlight's Muon the flag `use_muon`.
    """
    return float(state["step"]) > 0 if "step" in state else has_tensors(state)


class StateByParameter(defaultdict):
    """Maps a main param, or its model parameter of any shape, to the state of this rank's shard."""

    def __init__(self, states: Mapping[Tensor, Any], leaf_of: Callable[[Any], Tensor | None]):
        super().__init__(dict, states)
        self._leaf_of = leaf_of

    def _key(self, key: Any) -> Any:
        # State that the optimizer created for the parameter itself, before it was prepared, has precedence.
        leaf = None if super().__contains__(key) else self._leaf_of(key)
        return key if leaf is None else leaf

    def __missing__(self, key: Any) -> Any:
        resolved_key = self._key(key)
        return super().__missing__(key) if resolved_key is key else self[resolved_key]

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(self._key(key))

    def __setitem__(self, key: Any, state: Any) -> None:
        super().__setitem__(self._key(key), state)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._key(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._key(key), *default)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

"""An optimizer's state, found by the parameters of a model as well as by the leaves that stand for them."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class StateByParameter(defaultdict):
    """Maps a leaf, or the parameter of any shape that it stands for, to the leaf's state: of what this rank owns."""

    def __init__(self, states: Mapping[Tensor, Any], leaf_of: Callable[[Any], Tensor | None]):
        super().__init__(dict, states)
        self._leaf_of = leaf_of

    def _key(self, key: Any) -> Any:
        # State that an optimizer made of a parameter before it was prepared has precedence.
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

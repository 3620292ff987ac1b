"""Base class of objects that a deep copy of a model shares with the original."""

from typing import Any


class Shared:
    """Base of what a deep copy of a model shares with the original."""

    def __deepcopy__(self, memo: dict) -> Any:
        return self

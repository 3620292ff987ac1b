"""Trainer names ranks that take longer than the others of their stage."""

from typing import Any

from ....diagnostics.stragglers import StragglerWatch
from .base import WatchCallback


class StragglerCallback(WatchCallback):
    """Prints on rank 0 which rank is slow, how much, and in which module and function; `reports` has what was found.

    Args:
        arguments: of `StragglerWatch`, such as `steps` and `factor`.

    Raises:
        ConfigError: when training begins, a model that was not laid out, or a number out of its range.
    """

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> StragglerWatch:
        """Returns what looks at every rank."""
        return StragglerWatch(model, optimizer, **arguments)

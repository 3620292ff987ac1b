"""Trainer says where a step that was skipped was not finite first."""

from typing import Any

from ....diagnostics.nonfinite import NonFiniteWatch
from .base import WatchCallback


class NonFiniteCallback(WatchCallback):
    """Runs skipped steps again, and prints on rank 0 which rank, microbatch, stage and module was not finite first.

    `reports` has what was found.

    Args:
        limit (`int`, defaults to 3): reports of a run.

    Raises:
        ConfigError: when training begins, a model that was not laid out.
    """

    def __init__(self, limit: int = 3) -> None:
        super().__init__(limit=limit)

    def make_watch(self, model: Any, optimizer: Any, **arguments: Any) -> NonFiniteWatch:
        """Returns what looks at skipped steps."""
        return NonFiniteWatch(model, optimizer, **arguments)

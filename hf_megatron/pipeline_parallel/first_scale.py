"""What the first loss of a pipelined model will probably be multiplied by: the scale of the newest loss scaler.

Gradients of a scheduled forward exist before backward tells their scale. In fp16 many of them are too small to be
computed unscaled and multiplied later.
"""

import weakref
from typing import Any

_newest: list[weakref.ref] = []


def remember(scaler: Any) -> None:
    """Takes note of a `GradScaler`."""
    _newest[:] = [weakref.ref(scaler)]


def first_scale() -> float:
    """The scale of the newest loss scaler that still exists; 1 without one."""
    scaler = _newest[0]() if _newest else None
    return 1.0 if scaler is None else scaler.get_scale()

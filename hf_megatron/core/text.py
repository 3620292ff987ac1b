"""Safe formatting of values from files and users in messages: bounded time and length, no control characters."""

from typing import Any

from ..errors import _MOST, sanitize

_DEEPEST = 3


_ITEMS = 8


def safe_repr(value: Any, most: int = _MOST) -> str:
    """Formats a value for a message: at most `most` characters, no control characters, no deep nesting.

    The `repr` of a value from a file may take exponential time if it is nested, or contain terminal escape sequences.
    """
    return sanitize(_text(value, _DEEPEST), most)


def error_summary(error: BaseException) -> str:
    """Formats a third-party exception for a message: its type and the first line of its text.

    If that line ends with a colon, the next line is included.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {safe_repr(text)}"


def _text(value: Any, depth: int) -> str:
    if isinstance(value, str):
        return value[: _MOST + 1] if depth == _DEEPEST else repr(value[: _MOST + 1])
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _format_items(value, depth)
    return f"a {type(value).__name__}"


def _format_items(value: Any, depth: int) -> str:
    opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")") if isinstance(value, tuple) else ("{", "}")
    if depth == 0:
        return f"{opening}...{closing}"
    parts = []
    for item, _ in zip(value, range(_ITEMS), strict=False):
        text = _text(item, depth - 1)
        parts.append(f"{text}: {_text(value[item], depth - 1)}" if isinstance(value, dict) else text)
    return f"{opening}{', '.join(parts)}{', ...' if len(value) > _ITEMS else ''}{closing}"

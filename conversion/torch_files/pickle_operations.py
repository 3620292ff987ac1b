"""Operations of pickle protocols 2 to 5, grouped by effect and operand."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Operations that push a constant, and operations with an operand of so many bytes: the length of the byte string that
# follows, a memo index to read or write, or an integer.
CONSTANTS: Mapping[int, Any] = MappingProxyType({ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()})
TEXT, LONG = frozenset({ord("X"), 0x8C, 0x8D}), frozenset({0x8A, 0x8B})
COUNTED = TEXT | LONG | {ord("B"), ord("C"), 0x8E, 0x96}
PUTS, SIGNED = frozenset(b"qr"), ord("J")
SHORT_GET, GETS, CALLS = ord("h"), frozenset(b"hj"), frozenset(b"R\x81")
MEMOIZE, MARK, STOP = 0x94, ord("("), ord(".")
DICT, LIST, TUPLE, BUILD = ord("}"), ord("]"), ord("t"), ord("b")
SET_ITEM, SET_ITEMS, APPEND, APPENDS = ord("s"), ord("u"), ord("a"), ord("e")
REDUCE, NEW_WITH_KEYWORDS = ord("R"), 0x92
OPERANDS = MappingProxyType(
    {
        **dict.fromkeys((0x8C, ord("C"), 0x8A, ord("q"), ord("K")), 1),
        **dict.fromkeys((ord("M"),), 2),
        **dict.fromkeys((ord("X"), ord("B"), 0x8B, ord("r"), SIGNED), 4),
        **dict.fromkeys((0x8D, 0x8E, 0x96), 8),
    }
)
TUPLES = MappingProxyType({0x85: 1, 0x86: 2, 0x87: 3})


def decoded(operation: int, run: bytes) -> str | int | bytes:
    """Returns the value that an operation creates from the byte string after it."""
    if operation in TEXT:
        return run.decode("utf-8", "surrogatepass")
    return int.from_bytes(run, "little", signed=True) if operation in LONG else run

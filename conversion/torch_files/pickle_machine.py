"""The machine of `safe_pickle`: interprets a pickle's operations, and calls nothing of what it names."""

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ...errors import CheckpointError
from .pickled_values import Getattr, Named, Record, check_expansion, hashable

# Operations that push a constant, and those with an operand of so many bytes: the length of a run of bytes that
# follows, a place in the memo to read or write, or an integer.
_CONSTANTS: Mapping[int, Any] = MappingProxyType({ord("N"): None, 0x88: True, 0x89: False, ord(")"): ()})
_TEXT, _LONG = frozenset({ord("X"), 0x8C, 0x8D}), frozenset({0x8A, 0x8B})
_COUNTED = _TEXT | _LONG | {ord("B"), ord("C"), 0x8E, 0x96}
_GETS, _PUTS = frozenset(b"hj"), frozenset(b"qr")
_SIGNED = ord("J")
_REDUCE, _NEW, _NEW_WITH_KEYWORDS = ord("R"), 0x81, 0x92
_GETATTR = Getattr()
# As protocols 2 and from 3 on spell it.
_NAMES_OF_GETATTR = frozenset({"__builtin__.getattr", "builtins.getattr"})
_OPERANDS = MappingProxyType(
    {
        **dict.fromkeys((0x8C, ord("C"), 0x8A, ord("h"), ord("q"), ord("K")), 1),
        **dict.fromkeys((ord("M"),), 2),
        **dict.fromkeys((ord("X"), ord("B"), 0x8B, ord("j"), ord("r"), _SIGNED), 4),
        **dict.fromkeys((0x8D, 0x8E, 0x96), 8),
    }
)
_TUPLES = MappingProxyType({0x85: 1, 0x86: 2, 0x87: 3})


def _decoded(operation: int, run: bytes) -> str | int | bytes:
    if operation in _TEXT:
        return run.decode("utf-8", "surrogatepass")
    return int.from_bytes(run, "little", signed=True) if operation in _LONG else run


# How many objects, of some 200 bytes each, every pickle may make, and for how many of its bytes a long one may make one
# more (that of a store with millions of chunks); how much calls may read of what they are given for each byte: one
# object may be given to many of them.
_PARTS, _BYTES_PER_PART = 6_000_000, 8
_READ_PER_BYTE, _READ = 4, 1 << 20
_COUNTED_TYPES = frozenset({str, bytes, tuple, list, dict, set, frozenset})
_TOO_LARGE = "what it makes of its bytes is far larger than they are."
# What holds no further parts, and how long a text may be to count as one.
_LONG_TEXT = 256
_PLAIN = frozenset({int, float, bool, type(None), Named, torch.dtype})
_SINGLE = _PLAIN | {str}


class Machine:
    """Interprets one pickle.

    Args:
        data: that begins with it.
        names, persistent, prefixes: as `safe_pickle.unpickle` has them.

    Attributes:
        end: where the pickle ends, after `run()`.
    """

    def __init__(
        self, data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None, prefixes: tuple[str, ...]
    ):
        self.end = 0
        self._parts = max(_PARTS, len(data) // _BYTES_PER_PART)
        self._to_read = _READ + _READ_PER_BYTE * len(data)
        self._data, self._names, self._persistent, self._prefixes = data, names, persistent, prefixes
        self._position = 0
        self._stack: list[Any] = []
        # Where marks lie in it.
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        # Whether something that holds further parts may be in several places; its parts then count in each.
        self._shares = False
        self._bare: set[int] = set()
        self._counts: dict[str, int] = {}

    def _again(self, value: Any) -> Any:
        """Returns a value of the memo, which may be in the pickle's value already."""
        kind = type(value)
        if kind is str and len(value) > _LONG_TEXT:
            self._read(len(value))
        if kind in _SINGLE:
            return value
        if kind is Record and value.state is None:
            # It may get a state later on.
            self._bare.add(id(value))
        parts = value.arguments if kind is Record else value
        if (kind is tuple or id(value) in self._bare) and all(type(part) in _SINGLE for part in parts):
            self._read(len(parts))
        else:
            self._shares = True
        return value

    def _charge(self, *values: Any) -> None:
        """Takes what a call reads of its arguments, or a table of a key, off the budget."""
        for value in values:
            kind = type(value)
            if kind in _COUNTED_TYPES:
                self._to_read -= len(value)
            elif kind is int:
                self._to_read -= value.bit_length() >> 6
        self._parts -= 1
        if self._to_read < 0 or self._parts < 0:
            raise CheckpointError(_TOO_LARGE)

    def _read(self, length: int) -> None:
        self._to_read -= length
        if self._to_read < 0:
            raise CheckpointError(_TOO_LARGE)

    def _made(self, container: Any) -> None:
        self._charge()
        self._stack.append(container)

    def _key(self, key: Any) -> Any:
        self._read(key.bit_length() >> 6 if type(key) is int else len(key) if type(key) in _COUNTED_TYPES else 1)
        return hashable(key)

    def _take(self, count: int) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise ValueError("it is cut off")
        return self._data[start : self._position]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._position)
        return self._take(end + 1 - self._position)[:-1].decode()

    def run(self) -> Any:
        """Interprets the pickle, and returns its value."""
        actions: dict[int, Callable[[], object]] = {
            0x80: lambda: self._protocol(self._take(1)[0]),
            0x95: lambda: self._check_frame(self._number(8)),
            ord("("): lambda: self._marks.append(len(self._stack)),
            ord("]"): lambda: self._made([]),
            ord("}"): lambda: self._made({}),
            0x8F: lambda: self._made(set()),
            ord("0"): self._stack.pop,
            ord("1"): self._marked,
            ord("G"): lambda: self._stack.append(struct.unpack(">d", self._take(8))[0]),
            ord("t"): lambda: self._made(tuple(self._marked())),
            0x91: lambda: self._made(frozenset(map(self._key, self._marked()))),
            ord("a"): lambda: self._extend([self._stack.pop()]),
            ord("e"): lambda: self._extend(self._marked()),
            ord("s"): lambda: self._update([self._stack.pop(), self._stack.pop()][::-1]),
            ord("u"): lambda: self._update(self._marked()),
            0x90: lambda: self._add(self._marked()),
            ord("c"): lambda: self._stack.append(self._name(self._line(), self._line())),
            0x93: lambda: self._stack.append(self._name(*[self._stack.pop(), self._stack.pop()][::-1])),
            _REDUCE: lambda: self._call(_REDUCE),
            _NEW: lambda: self._call(_NEW),
            _NEW_WITH_KEYWORDS: lambda: self._call(_NEW_WITH_KEYWORDS),
            ord("b"): self._build,
            ord("Q"): lambda: self._stack.append(self._persist(self._stack.pop())),
        }
        data, stack, memo = self._data, self._stack, self._memo
        position = 0
        while True:
            operation = data[position]
            position += 1
            # The two most frequent ones have no operand, or one of a byte.
            if operation == 0x94:
                memo[len(memo)] = stack[-1]
            elif operation == 0x68:
                value = memo[data[position]]
                stack.append(value if type(value) in _PLAIN else self._again(value))
                position += 1
            elif operation in _OPERANDS:
                end = position + _OPERANDS[operation]
                if end > len(data):
                    raise ValueError("it is cut off")
                number = int.from_bytes(data[position:end], "little", signed=operation == _SIGNED)
                position = end
                if operation in _COUNTED:
                    position = end + number
                    if position > len(data):
                        raise ValueError("it is cut off")
                    stack.append(_decoded(operation, data[end:position]))
                elif operation in _GETS:
                    stack.append(self._again(memo[number]))
                elif operation in _PUTS:
                    memo[number] = stack[-1]
                else:
                    stack.append(number)
            elif operation in _TUPLES:
                count = _TUPLES[operation]
                self._charge()
                made = tuple(stack[-count:])
                if len(made) != count:
                    raise ValueError("its stack is out of order")
                stack[-count:] = [made]
            elif operation in _CONSTANTS:
                stack.append(_CONSTANTS[operation])
            elif operation == ord("."):
                (value,) = stack
                self.end = position
                if self._shares:
                    check_expansion(value, _READ + _READ_PER_BYTE * len(data))
                return value
            elif operation in actions:
                self._position = position
                actions[operation]()
                position = self._position
            else:
                raise ValueError(f"operation {operation:#04x} at byte {position - 1} is not one that is written")

    def _protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise ValueError(f"protocol {version}")

    def _check_frame(self, size: int) -> None:
        if self._position + size > len(self._data):
            raise ValueError("it is cut off")

    def _marked(self) -> list[Any]:
        """Takes off what was pushed since the last mark."""
        start = self._marks.pop()
        if start > len(self._stack):
            raise ValueError("its stack is out of order")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError("it appends to what is no list")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict or len(values) % 2:
            raise TypeError("it sets items of what is no table")
        self._stack[-1].update(zip(map(self._key, values[::2]), values[1::2], strict=True))

    def _add(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not set:
            raise TypeError("it adds to what is no set")
        self._stack[-1].update(map(self._key, values))

    def _name(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a class is named by what is no text")
        full = f"{module}.{name}"
        if full in self._names:
            return self._names[full]
        if full.startswith(self._prefixes):
            return Named(full, has_members=True)
        if full in _NAMES_OF_GETATTR:
            return _GETATTR
        raise CheckpointError(f"it names {full}, which is not read.")

    def _call(self, operation: int) -> None:
        if operation == _NEW_WITH_KEYWORDS:
            self._stack.pop()
        arguments, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Named | Getattr) or type(arguments) is not tuple:
            raise TypeError("it calls what is no class")
        if called is _GETATTR and operation != _REDUCE:
            raise CheckpointError("it makes an object of builtins.getattr.")
        self._charge(*arguments)
        if isinstance(called, Named) and called.most is not None:
            self._counts[called.name] = count = self._counts.get(called.name, 0) + 1
            if count > called.most:
                raise CheckpointError(f"it has more than {called.most} {called.plural}.")
        self._stack.append(called(arguments))

    def _build(self) -> None:
        state, value = self._stack.pop(), self._stack[-1]
        if isinstance(value, Record):
            value.state = state
            self._shares |= id(value) in self._bare
        elif type(value) is not dict:
            raise TypeError(f"it sets attributes of a {type(value).__name__}")
        # Attributes of an OrderedDict, such as the `_metadata` of a module's state dict, are left out.

    def _persist(self, identifier: Any) -> Any:
        if self._persistent is None:
            raise ValueError("it has a persistent id")
        self._charge()
        return self._persistent(identifier)

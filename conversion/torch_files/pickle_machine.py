"""Stack machine of `safe_pickle`: interprets a pickle's operations without calling anything it names."""

import gc
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import CheckpointError
from . import pickle_operations as ops
from .pickled_values import COUNTED_TYPES, Getattr, Named, Record, check_expansion, measure_key_cost

_GETATTR = Getattr()
# Its names in protocol 2, and from protocol 3 on.
_NAMES_OF_GETATTR = frozenset({"__builtin__.getattr", "builtins.getattr"})

# Budgets. A pickle may create this many objects of about 200 bytes each, or one per so many of its bytes if it is long
# (as for a store with millions of chunks). Calls may read this much of their arguments per byte of the pickle, because
# one object can be passed to many calls.
_PARTS, _BYTES_PER_PART = 6_000_000, 8
_READ_PER_BYTE, _READ = 4, 1 << 20
# Number of keys, over all dicts, whose hashes the file can choose; colliding keys take quadratic time.
_FORESEEN_KEYS = 10_000
_TOO_LARGE = "the objects it creates are far larger than the pickle."
# Length up to which a string counts as one part, and types without inner parts.
_LONG_TEXT = 256
_PLAIN = frozenset({int, float, bool, type(None), Named, torch.dtype})
_SINGLE = _PLAIN | {str}


class Machine:
    """Interprets one pickle.

    Args:
        data: bytes that begin with the pickle.
        names, persistent, prefixes: as in `safe_pickle.unpickle`.

    Attributes:
        end: offset of the pickle's end, after `run()`.
    """

    def __init__(
        self, data: bytes, names: Mapping[str, Any], persistent: Callable[[Any], Any] | None, prefixes: tuple[str, ...]
    ):
        self.end = 0
        self._parts, self._foreseen = max(_PARTS, len(data) // _BYTES_PER_PART), _FORESEEN_KEYS
        self._to_read = _READ + _READ_PER_BYTE * len(data)
        self._data, self._names, self._persistent, self._prefixes = data, names, persistent, prefixes
        self._position = 0
        self._stack: list[Any] = []
        # Stack heights at the marks.
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        # True if a container may occur in several places of the value; its parts then count for each occurrence.
        self._shares = False
        self._bare: set[int] = set()
        self._counts: dict[str, int] = {}

    def _again(self, value: Any) -> Any:
        """Returns a value from the memo, which may already occur in the pickle's value."""
        kind = type(value)
        if kind is str and len(value) > _LONG_TEXT:
            self._read(len(value))
        if kind in _SINGLE:
            return value
        if kind is Record and value.state is None:
            # Its state may be set later.
            self._bare.add(id(value))
        parts = value.arguments if kind is Record else value
        if (kind is tuple or id(value) in self._bare) and _SINGLE.issuperset(map(type, parts)):
            self._read(len(parts))
        else:
            self._shares = True
        return value

    def _read(self, length: int) -> None:
        """Subtracts the length of data that a call or a dict reads from the budget."""
        self._to_read -= length
        if self._to_read < 0:
            raise CheckpointError(_TOO_LARGE)

    def _keys(self, keys: list[Any], there: int = 0) -> list[Any]:
        """Returns keys for a dict with `there` keys, after charging the cost of hashing them to the budgets."""
        length, foreseen = measure_key_cost(keys, there)
        self._foreseen -= foreseen
        if self._foreseen < 0:
            raise CheckpointError(
                f"it has more than {_FORESEEN_KEYS} keys that are neither strings nor consecutive integers from 0."
            )
        self._read(length)
        return keys

    def _take(self, count: int) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise ValueError("it is truncated")
        return self._data[start : self._position]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._position)
        return self._take(end + 1 - self._position)[:-1].decode()

    def run(self) -> Any:
        """Interprets the pickle and returns its value."""
        collects = gc.isenabled()
        # All created objects stay alive, so the garbage collector would only rescan them repeatedly.
        gc.disable()
        try:
            value = self._interpret()
        finally:
            if collects:
                gc.enable()
        if self._shares:
            check_expansion(value, _READ + _READ_PER_BYTE * len(self._data))
        return value

    def _interpret(self) -> Any:
        rare: dict[int, Callable[[], object]] = {
            0x80: self._protocol,
            0x95: self._check_frame,
            0x8F: lambda: self._stack.append(set()),
            ord("0"): self._stack.pop,
            ord("1"): self._marked,
            ord("G"): lambda: self._stack.append(struct.unpack(">d", self._take(8))[0]),
            0x91: lambda: self._stack.append(frozenset(self._keys(self._marked()))),
            0x90: lambda: self._add(self._marked()),
            ord("c"): lambda: self._stack.append(self._name(self._line(), self._line())),
            0x93: lambda: self._stack.append(self._name(*[self._stack.pop(), self._stack.pop()][::-1])),
            ops.NEW_WITH_KEYWORDS: self._call_without_keywords,
            ord("Q"): lambda: self._stack.append(self._persist(self._stack.pop())),
        }
        data, stack, memo, marks, parts = self._data, self._stack, self._memo, self._marks, self._parts
        constants, operands, tuples = map(dict, (ops.CONSTANTS, ops.OPERANDS, ops.TUPLES))
        position = 0
        # The pickle of a large store has tens of millions of operations: frequent ones come first and avoid calls.
        while True:
            operation = data[position]
            position += 1
            if operation == ops.MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif operation in ops.GETS:
                if operation == ops.SHORT_GET:
                    value = memo[data[position]]
                    position += 1
                else:
                    value = memo[int.from_bytes(data[position : position + 4], "little")]
                    position += 4
                kind = type(value)
                is_plain = kind in _PLAIN or (kind is str and len(value) <= _LONG_TEXT)
                stack.append(value if is_plain else self._again(value))
            elif operation in constants:
                stack.append(constants[operation])
            elif operation in ops.CALLS:
                parts -= 1
                if parts < 0:
                    raise CheckpointError(_TOO_LARGE)
                arguments = stack.pop()
                stack.append(self._call(stack.pop(), arguments, operation))
            elif operation == ops.MARK:
                marks.append(len(stack))
            elif operation == ops.BUILD:
                state, value = stack.pop(), stack[-1]
                if type(value) is Record and not self._bare:
                    value.state = state
                else:
                    self._build(value, state)
            elif operation in operands:
                end = position + operands[operation]
                if end > len(data):
                    raise ValueError("it is truncated")
                number = int.from_bytes(data[position:end], "little", signed=operation == ops.SIGNED)
                position = end
                if operation in ops.COUNTED:
                    position = end + number
                    if position > len(data):
                        raise ValueError("it is truncated")
                    stack.append(ops.decoded(operation, data[end:position]))
                elif operation in ops.PUTS:
                    memo[number] = stack[-1]
                else:
                    stack.append(number)
            elif operation == ops.SET_ITEMS:
                self._update(self._marked())
            elif operation == ops.SET_ITEM:
                self._update([stack.pop(), stack.pop()][::-1])
            elif operation == ops.APPEND:
                self._extend([stack.pop()])
            elif operation == ops.APPENDS:
                self._extend(self._marked())
            elif operation == ops.STOP:
                (value,) = stack
                self.end = position
                return value
            else:
                parts -= 1
                if parts < 0:
                    raise CheckpointError(_TOO_LARGE)
                if operation in tuples:
                    count = tuples[operation]
                    items = tuple(stack[-count:])
                    if len(items) != count:
                        raise ValueError("its stack is invalid")
                    stack[-count:] = [items]
                elif operation == ops.DICT:
                    stack.append({})
                elif operation == ops.LIST:
                    stack.append([])
                elif operation == ops.TUPLE:
                    stack.append(tuple(self._marked()))
                elif operation in rare:
                    self._position = position
                    rare[operation]()
                    position = self._position
                else:
                    raise ValueError(f"operation {operation:#04x} at byte {position - 1} is not supported")

    def _protocol(self) -> None:
        version = self._take(1)[0]
        if not 2 <= version <= 5:
            raise ValueError(f"protocol {version}")

    def _check_frame(self) -> None:
        size = int.from_bytes(self._take(8), "little")
        if self._position + size > len(self._data):
            raise ValueError("it is truncated")

    def _marked(self) -> list[Any]:
        """Pops the values pushed since the last mark."""
        start = self._marks.pop()
        if start > len(self._stack):
            raise ValueError("its stack is invalid")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError("it appends to a value that is not a list")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict or len(values) % 2:
            raise TypeError("it sets items of a value that is not a dict")
        table = self._stack[-1]
        table.update(zip(self._keys(values[::2], len(table)), values[1::2], strict=True))

    def _add(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not set:
            raise TypeError("it adds to a value that is not a set")
        self._stack[-1].update(self._keys(values, len(self._stack[-1])))

    def _name(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("the name of a class is not a string")
        full = f"{module}.{name}"
        if full in self._names:
            return self._names[full]
        if full.startswith(self._prefixes):
            return Named(full, has_members=True)
        if full in _NAMES_OF_GETATTR:
            return _GETATTR
        raise CheckpointError(f"it references {full}, which is not allowed.")

    def _call_without_keywords(self) -> None:
        self._stack.pop()
        arguments, called = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(called, arguments, ops.NEW_WITH_KEYWORDS))

    def _call(self, called: Any, arguments: Any, operation: int) -> Any:
        kind = type(called)
        if kind not in (Named, Getattr) or type(arguments) is not tuple:
            raise TypeError("it calls a value that is not a class")
        for value in arguments:
            value_type = type(value)
            if value_type in COUNTED_TYPES:
                self._read(len(value))
            elif value_type is int:
                self._read(value.bit_length() >> 6)
        if kind is Getattr:
            if operation != ops.REDUCE:
                raise CheckpointError("it creates an object of builtins.getattr.")
        elif called.keys is not None:
            self._keys(called.keys(arguments))
        elif called.most is not None:
            self._counts[called.name] = count = self._counts.get(called.name, 0) + 1
            if count > called.most:
                raise CheckpointError(f"it has more than {called.most} {called.plural}.")
        return called(arguments)

    def _build(self, value: Any, state: Any) -> None:
        if isinstance(value, Record):
            value.state = state
            self._shares |= id(value) in self._bare
        elif type(value) is not dict:
            raise TypeError(f"it sets attributes of a {type(value).__name__}")
        # Attributes of an OrderedDict, such as the `_metadata` of a module's state dict, are dropped.

    def _persist(self, identifier: Any) -> Any:
        if self._persistent is None:
            raise ValueError("it has a persistent id")
        return self._persistent(identifier)

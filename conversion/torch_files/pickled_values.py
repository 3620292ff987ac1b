"""Values that `safe_pickle` creates for a pickle's objects and names, and limits on their size."""

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import CheckpointError


class Record:
    """Inert object of a class that was not imported.

    Attributes:
        kind: module and name of the class.
        arguments: arguments of the constructor call in the pickle.
        state: state to set the attributes from, `None` if the pickle has none.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()):
        self.kind, self.arguments, self.state = kind, arguments, None

    def __getitem__(self, field: str) -> Any:
        """Returns an attribute; raises `KeyError` if the file has none of that name."""
        if not isinstance(self.state, dict):
            raise KeyError(field)
        return self.state[field]

    def get(self, field: str) -> Any:
        """Returns an attribute, or `None`."""
        return self.state.get(field) if isinstance(self.state, dict) else None


class Named:
    """A class or function that a pickle names.

    Args:
        name: module and name.
        make: computes the result of calling it from the arguments; creates a `Record` by default.
        most: maximum number of calls in a pickle; `plural` names the objects in the error.
        has_members: whether it may be an enumeration whose members a pickle may look up.
        keys: returns the arguments that become keys of a dict or a set.
    """

    __slots__ = ("_make", "has_members", "keys", "most", "name", "plural")

    def __init__(
        self,
        name: str,
        make: Callable[[tuple[Any, ...]], Any] | None = None,
        most: int | None = None,
        plural: str = "",
        *,
        has_members: bool = False,
        keys: Callable[[tuple[Any, ...]], list[Any]] | None = None,
    ):
        self.name, self._make, self.most, self.plural = name, make, most, plural
        self.has_members, self.keys = has_members, keys

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        return Record(self.name, arguments) if self._make is None else self._make(arguments)


class Getattr:
    """Replacement for `getattr` in a pickle: Python 3.11.0 to 3.11.3 pickle enumeration members with it.

    It reads no attribute: it creates a record from an enumeration's name and a member's name, and rejects all else.
    """

    def __call__(self, arguments: tuple[Any, ...]) -> Record:
        """Returns the record of `(enumeration, member)`; raises `CheckpointError` for anything else."""
        match arguments:
            case (Named(has_members=True, name=enumeration), str(member)) if _is_member(member):
                return Record(enumeration, (member,))
        raise CheckpointError("it references builtins.getattr, which is only allowed for enumerations.")


def _is_member(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")


_SCALARS = frozenset({str, int, float, bool, bytes, type(None), Record})


def hashable(key: Any) -> Any:
    """Returns a dict key; rejects nested tuples, whose hash can take exponential time."""
    kind = type(key)
    if kind in _SCALARS or (kind is tuple and all(type(part) in _SCALARS for part in key)):
        return key
    raise CheckpointError(f"it has a {kind.__name__} as a dict key.")


_UNFORESEEN = frozenset({bytes, Record})
# Types that a call reads completely if it gets them as an argument.
COUNTED_TYPES = frozenset({str, bytes, tuple, list, dict, set, frozenset})
# Larger integers are reduced by the hash function and can collide with smaller ones.
_LONGEST_KEY = 61


def measure_key_cost(keys: Sequence[Any], there: int) -> tuple[int, int]:
    """Returns the length of data read to hash keys, and the number of keys whose hash the file can choose.

    Many keys with the same hash, or that occupy each other's slots, take quadratic time. Hashes of strings are salted,
    and a record's hash is its address. Integers that continue the existing keys, as an optimizer's parameter indices
    do, each have their own slot.

    Args:
        there: number of keys already in the table.

    Raises:
        CheckpointError: a key has an unsupported type, or is an integer larger than any that is written.
    """
    length = foreseen = 0
    for place, key in enumerate(keys, there):
        kind = type(key)
        if kind is str:
            length += len(key)
            continue
        hashable(key)
        if kind is int:
            if key.bit_length() > _LONGEST_KEY:
                raise CheckpointError(f"it has an integer of {key.bit_length()} bits as a dict key.")
            foreseen += key != place
        else:
            foreseen += kind not in _UNFORESEEN
            length += len(key) if kind in COUNTED_TYPES else 1
    return length, foreseen


def check_expansion(value: Any, most: int) -> None:
    """Rejects a value with more than `most` parts, or a cyclic one; shared parts count once per occurrence.

    Raises:
        CheckpointError: the value is too large.
    """
    sizes: dict[int, int] = {}
    pending = [(value, False)]
    while pending:
        one, is_done = pending.pop()
        parts = _parts_of(one)
        if is_done:
            sizes[id(one)] = 1 + sum(sizes.get(id(part)) or _estimate_size(part) for part in parts)
            if sizes[id(one)] > most:
                raise CheckpointError("it repeats shared objects more often than it has bytes.")
        elif parts and id(one) not in sizes:
            # Sentinel until its parts are counted: a value that contains itself exceeds the limit.
            sizes[id(one)] = most + 1
            pending.append((one, True))
            pending += [(part, False) for part in parts]


def _estimate_size(value: Any) -> int:
    return 1 + len(value) // 32 if isinstance(value, (str, bytes)) else 1


def _parts_of(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Record):
        return [*value.arguments, value.state]
    return value if isinstance(value, (list, tuple)) else ()

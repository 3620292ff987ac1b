"""What `safe_pickle` makes of a pickle's objects and names, and how large that may be."""

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import CheckpointError


class Record:
    """An object of a class that was not looked up.

    Attributes:
        kind: module and name of the class.
        arguments: what its constructor would have got.
        state: what its attributes would have been set from, `None` without.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...] = ()):
        self.kind, self.arguments, self.state = kind, arguments, None

    def __getitem__(self, field: str) -> Any:
        """Returns an attribute; `KeyError` where the file has none of that name."""
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
        make: what stands for a call of it, given the arguments; a `Record` by default.
        most: how many of them a pickle may have, and what they are called then.
        has_members: whether it may be an enumeration, of which a pickle may ask for a member.
        keys: which of the arguments become keys of a table or a set.
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
    """Python's `getattr` where a pickle names it: Python 3.11.0 to 3.11.3 write members of enumerations by it.

    It reads no attribute: of an enumeration's name and a member's it makes a record of both, and refuses all else.
    """

    def __call__(self, arguments: tuple[Any, ...]) -> Record:
        """Makes the record of `(enumeration, member)`; `CheckpointError` for anything else."""
        match arguments:
            case (Named(has_members=True, name=enumeration), str(member)) if _is_member(member):
                return Record(enumeration, (member,))
        raise CheckpointError("it names builtins.getattr, which is read of enumerations alone.")


def _is_member(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_")


_SCALARS = frozenset({str, int, float, bool, bytes, type(None), Record})


def hashable(key: Any) -> Any:
    """Returns a key of a table; refuses nested tuples, whose hash can take exponential time."""
    kind = type(key)
    if kind in _SCALARS or (kind is tuple and all(type(part) in _SCALARS for part in key)):
        return key
    raise CheckpointError(f"it has a {kind.__name__} as a key.")


_UNFORESEEN = frozenset({bytes, Record})
# What is read as a whole by whoever is given it.
COUNTED_TYPES = frozenset({str, bytes, tuple, list, dict, set, frozenset})
# From here on integers have the hash of smaller ones.
_LONGEST_KEY = 61


def cost_of_keys(keys: Sequence[Any], there: int) -> tuple[int, int]:
    """Returns how much the hashes of keys read, and how many of the keys have a hash that the file chose.

    Many keys with one hash, or in each other's places, take quadratic time. The hashes of texts are salted, that of a
    record is its place in memory. Numbers that count on from those that are there, as an optimizer's parameters do,
    each have a place.

    Args:
        there: how many keys are in the table before these.

    Raises:
        CheckpointError: one is of a kind that is not hashed, or an integer larger than any that is written.
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
                raise CheckpointError(f"it has an integer of {key.bit_length()} bits as a key.")
            foreseen += key != place
        else:
            foreseen += kind not in _UNFORESEEN
            length += len(key) if kind in COUNTED_TYPES else 1
    return length, foreseen


def check_expansion(value: Any, most: int) -> None:
    """Refuses a value of more than so many parts, or of endlessly many; each counts as often as it is to be found.

    Raises:
        CheckpointError: it is so.
    """
    sizes: dict[int, int] = {}
    pending = [(value, False)]
    while pending:
        one, is_done = pending.pop()
        parts = _parts_of(one)
        if is_done:
            sizes[id(one)] = 1 + sum(sizes.get(id(part)) or _size_of(part) for part in parts)
            if sizes[id(one)] > most:
                raise CheckpointError("it holds the same parts again and again, more often than it has bytes.")
        elif parts and id(one) not in sizes:
            # Until its parts are counted; who meets it again before that lies inside of it.
            sizes[id(one)] = most + 1
            pending.append((one, True))
            pending += [(part, False) for part in parts]


def _size_of(value: Any) -> int:
    return 1 + len(value) // 32 if isinstance(value, (str, bytes)) else 1


def _parts_of(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Record):
        return [*value.arguments, value.state]
    return value if isinstance(value, (list, tuple)) else ()

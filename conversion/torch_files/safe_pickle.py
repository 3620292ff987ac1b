"""Reads a pickle without executing it: nothing that a file names is imported or called.

A small stack machine interprets the operations that `pickle.dump` writes in protocols 2 to 5. Classes are looked up in
a table from the caller; their objects become plain values or inert `Record`s of the file's content. Other names raise
an error. Time and memory are linear in the length of the pickle.
"""

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...errors import CheckpointError
from .pickle_machine import Machine
from .pickled_values import Named, Record, hashable

__all__ = [
    "CONTAINERS",
    "Named",
    "Names",
    "Record",
    "enumeration_names",
    "record_names",
    "unpickle",
    "unpickle_first",
]

# Allowed names in a pickle, each with a `Named`, or with the value itself (a dtype).
Names = Mapping[str, Any]


def record_names(*names: str) -> Names:
    """Returns a table of classes whose objects become records."""
    return MappingProxyType({name: Named(name) for name in names})


def enumeration_names(*names: str) -> Names:
    """Returns a table of enumerations, whose members become records of the value or of the name in the file."""
    return MappingProxyType({name: Named(name, has_members=True) for name in names})


def _pairs(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [tuple(pair) for pair in (arguments[0] if arguments else ())]


def _table(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    return {hashable(key): value for key, value in _pairs(arguments)}


def _set(arguments: tuple[Any, ...]) -> set[Any]:
    return {hashable(value) for value in arguments[0]}


def _bytes(arguments: tuple[Any, ...]) -> bytes:
    text, encoding = arguments
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return str(text).encode("latin1")


_SETS = ("builtins.set", "__builtin__.set")
# Containers as pickled by protocol 2.
CONTAINERS: Names = MappingProxyType(
    {
        "collections.OrderedDict": Named(
            "collections.OrderedDict", _table, keys=lambda arguments: [pair[0] for pair in _pairs(arguments)]
        ),
        **{name: Named(name, _set, keys=lambda arguments: [*arguments[0]]) for name in _SETS},
        "_codecs.encode": Named("_codecs.encode", _bytes),
    }
)


_BAD = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError, struct.error)


def unpickle(
    data: bytes,
    where: str,
    names: Names,
    persistent: Callable[[Any], Any] | None = None,
    prefixes: tuple[str, ...] = (),
) -> Any:
    """Returns the value of a pickle; arguments and errors as for `unpickle_first`."""
    return unpickle_first(data, where, names, persistent, prefixes)[0]


def unpickle_first(
    data: bytes,
    where: str,
    names: Names,
    persistent: Callable[[Any], Any] | None = None,
    prefixes: tuple[str, ...] = (),
) -> tuple[Any, int]:
    """Returns the value of the pickle at the start of `data`, and the pickle's length in bytes.

    Args:
        where: the file, for errors.
        names: allowed classes, in addition to containers.
        persistent: returns the value of a persistent id; if `None`, persistent ids are rejected.
        prefixes: name prefixes (`megatron.`) of additional classes whose objects become records.

    Raises:
        CheckpointError: naming the file and the class it names, or the damage.
    """
    try:
        machine = Machine(data, {**CONTAINERS, **names}, persistent, prefixes)
        return machine.run(), machine.end
    except CheckpointError as error:
        raise CheckpointError(f"{where} is rejected: {error}") from error
    except _BAD as error:
        raise CheckpointError(f"{where} is damaged: its pickle cannot be read ({error}).") from error

"""Parsing of Megatron-LM arguments from a mapping: names, defaults, and value types."""

from collections.abc import Mapping
from typing import Any

from ..errors import DataError


def with_defaults(arguments: Mapping[str, Any], defaults: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns arguments by their names without dashes, with defaults for missing ones.

    Raises:
        DataError: an argument without a default, which is not of this kind.
    """
    merged = dict(defaults)
    for name, value in arguments.items():
        key = name.lstrip("-").replace("-", "_")
        if key not in merged:
            raise DataError(
                f"Megatron argument {name!r} (value {value!r}) is not an argument of {kind}: expected one of "
                f"{', '.join(merged)}."
            )
        merged[key] = value
    return merged


def parse_integer(arguments: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Returns an argument as an integer of at least `least`."""
    try:
        number = int(arguments[name])
    except (TypeError, ValueError):
        raise DataError(f"{name} = {arguments[name]!r}: expected an integer.") from None
    if number < least:
        raise DataError(f"{name} = {number}: expected {least} or more.")
    return number


def real_number(arguments: Mapping[str, Any], name: str) -> float:
    """Returns an argument as a float."""
    try:
        return float(arguments[name])
    except (TypeError, ValueError):
        raise DataError(f"{name} = {arguments[name]!r}: expected a number.") from None


def truth_value(arguments: Mapping[str, Any], name: str) -> bool:
    """Returns an argument as a bool."""
    text = str(arguments[name]).lower()
    if text not in ("true", "false"):
        raise DataError(f"{name} = {arguments[name]!r}: expected True or False.")
    return text == "true"

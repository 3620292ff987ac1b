"""Every exception the library raises on purpose; all derive from `MegatronError`."""

# A list of names that came from a file may be as long as the file.
_LONGEST = 16_000


class MegatronError(Exception):
    """Base class of the library's own errors."""


class ConfigError(MegatronError, ValueError):
    """A configuration field, its value and what would be valid."""


class UnsupportedError(MegatronError, NotImplementedError):
    """A feature, module or combination that is refused by name, with the way round it."""


class UnverifiedLayoutError(MegatronError):
    """A model type and layout without a recorded parity result."""


class PlanError(MegatronError):
    """A parameter nobody claims, a rule that matches nothing, or a module a style cannot be applied to."""


class CheckpointError(MegatronError):
    """Weights that are missing, surplus, mis-shaped or unsafe to read; one line, names from files without escapes."""

    def __init__(self, message: object = ""):
        super().__init__(sanitize(str(message), _LONGEST))


class DataError(MegatronError):
    """Files of training data that are missing, damaged or of another kind, or an order that they do not give."""

    def __init__(self, message: object = ""):
        super().__init__(sanitize(str(message), _LONGEST))


class NonFiniteGradientError(MegatronError):
    """More optimizer steps in a row than allowed had a gradient that is not finite."""


class ReplicaError(MegatronError):
    """Something that ranks repeat is no longer equal on all of them."""


class RankError(MegatronError):
    """One or more ranks of a forked group failed, disagreed or got stuck."""


__all__ = [
    "CheckpointError",
    "ConfigError",
    "MegatronError",
    "NonFiniteGradientError",
    "PlanError",
    "RankError",
    "ReplicaError",
    "UnsupportedError",
    "UnverifiedLayoutError",
]


_MOST = 200


def sanitize(text: str, most: int = _MOST) -> str:
    """Returns a text of at most `most` characters, in one line, with what cannot be printed spelled out."""
    cut = text[: most + 1]
    printable = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in cut)
    return printable if len(printable) <= most else f"{printable[: most - 3]}..."

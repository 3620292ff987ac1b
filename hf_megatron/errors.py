"""All exceptions that the library raises on purpose; they derive from `MegatronError`."""

# Limit on message length: a list of names from a file can be as long as the file.
_LONGEST = 16_000


class MegatronError(Exception):
    """Base class of the library's errors."""


class ConfigError(MegatronError, ValueError):
    """Raised for an invalid configuration value; names the field, the value and the valid choices."""


class UnsupportedError(MegatronError, NotImplementedError):
    """Raised for an unsupported feature, module or combination; names it and a workaround."""


class UnverifiedLayoutError(MegatronError):
    """Raised for a model type and layout without a recorded parity result."""


class PlanError(MegatronError):
    """Raised for a parameter without a sharding rule, a rule that matches nothing, or a style that does not apply."""


class CheckpointError(MegatronError):
    """Raised for missing, surplus, mis-shaped or unsafe weights; the message is one line without control characters."""

    def __init__(self, message: object = ""):
        super().__init__(sanitize(str(message), _LONGEST))


class DataError(MegatronError):
    """Raised for missing, damaged or unexpected training data, or an order of samples that it cannot provide."""

    def __init__(self, message: object = ""):
        super().__init__(sanitize(str(message), _LONGEST))


class NonFiniteGradientError(MegatronError):
    """Raised when more consecutive optimizer steps than allowed have a non-finite gradient."""


class ReplicaError(MegatronError):
    """Raised when replicated state is no longer equal on all ranks."""


class RankError(MegatronError):
    """Raised when ranks of a group fail, disagree, hang or run different operations."""


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
    """Returns a one-line text of at most `most` characters, with non-printable characters escaped."""
    cut = text[: most + 1]
    printable = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in cut)
    return printable if len(printable) <= most else f"{printable[: most - 3]}..."

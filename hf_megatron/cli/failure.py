"""How commands fail: one line on stderr and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

# What was asked for came out otherwise, or cannot be; the question was wrong.
MISMATCH, USAGE = 1, 2


@contextmanager
def failing(*found: type[Exception]) -> Iterator[None]:
    """Ends the command when something is wrong, with the error's own words.

    Args:
        found: errors that say something of what the command looked at: it exits with 1. Every other one that is raised
            on purpose says that it was called wrongly: it exits with 2.
    """
    from ..errors import ConfigError, MegatronError

    try:
        yield
    except (MegatronError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        is_found = isinstance(error, found) and not isinstance(error, ConfigError)
        raise typer.Exit(MISMATCH if is_found else USAGE) from None

"""Exit codes of commands, and the one line on stderr that says why a command failed.

0: done, or the answer is yes. 1: the command failed, or the answer is no. 2: wrong usage; no work was started.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

FAILURE, USAGE = 1, 2
# Exit code of shells and typer.
INTERRUPTED = 128 + signal.SIGINT
_MESSAGE = "Interrupted."


@contextmanager
def failing() -> Iterator[None]:
    """Ends the command with the message of an error that the library raises on purpose.

    A `ConfigError` is wrong usage (exit code 2); every other error is a failure of the command's work (exit code 1).
    """
    from ..errors import ConfigError, MegatronError

    try:
        yield
    except (MegatronError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE if isinstance(error, ConfigError) else FAILURE) from None


@contextmanager
def reporting_interrupts() -> Iterator[None]:
    """Prints that Ctrl-C ended the command; typer only sets the exit code."""
    try:
        yield
    except SystemExit as ending:
        if ending.code == INTERRUPTED:
            typer.echo(_MESSAGE, err=True)
        raise


@contextmanager
def interrupting_at_once() -> Iterator[None]:
    """Ends the process immediately on Ctrl-C, for use while there is nothing to clean up.

    Modules may swallow a `KeyboardInterrupt` during their import, or turn it into another error.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{_MESSAGE}\n".encode())
    os._exit(INTERRUPTED)

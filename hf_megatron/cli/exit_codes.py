"""Failures and interruptions of commands: one line on stderr and an exit code."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from ..config import CHOICES
from ..errors import ConfigError

# A negative result or bad input; a wrong call.
MISMATCH, USAGE = 1, 2
# Exit code of shells and typer.
INTERRUPTED = 128 + signal.SIGINT
_SAID = "Interrupted."


@contextmanager
def failing(*mismatch_errors: type[Exception]) -> Iterator[None]:
    """Ends the command with the message of an error that the library raises on purpose.

    Args:
        mismatch_errors: errors about the command's input, which exit with 1. Others mean wrong usage and exit with 2.
    """
    from ..errors import ConfigError, MegatronError

    try:
        yield
    except (MegatronError, ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        is_found = isinstance(error, mismatch_errors) and not isinstance(error, ConfigError)
        raise typer.Exit(MISMATCH if is_found else USAGE) from None


@contextmanager
def saying_interrupted() -> Iterator[None]:
    """Prints that Ctrl-C ended the command; typer only sets the exit code."""
    try:
        yield
    except SystemExit as ending:
        if ending.code == INTERRUPTED:
            typer.echo(_SAID, err=True)
        raise


@contextmanager
def ended_at_once() -> Iterator[None]:
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
    os.write(2, f"{_SAID}\n".encode())
    os._exit(INTERRUPTED)


def recompute_mode(word: str) -> str | None:
    """Parses a value of `MegatronConfig.recompute`, with `none` for `None`; raises `ConfigError` for other words."""
    modes = {"none" if mode is None else str(mode): mode for mode in CHOICES["recompute"]}
    if word not in modes:
        raise ConfigError(f"--recompute {word}: expected one of {', '.join(modes)}.")
    return modes[word]


def format_layout(tp: int, sp: bool, cp: int, pp: int, ep: int) -> str:
    """Returns sizes as a layout string, with the data-parallel ranks that ep needs beyond the tp and cp ranks."""
    experts = f"+dp{max(ep // (tp * cp), 1)}+ep{ep}" if ep > 1 else ""
    return f"tp{tp}" + ("+sp" if sp else "") + (f"+cp{cp}" if cp > 1 else "") + f"+pp{pp}" + experts

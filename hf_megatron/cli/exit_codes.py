"""How commands fail or are interrupted: one line on stderr and an exit code."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from ..config import CHOICES
from ..errors import ConfigError

# What was asked for came out otherwise, or cannot be; the question was wrong.
MISMATCH, USAGE = 1, 2
# As shells have it, and what typer exits with.
INTERRUPTED = 128 + signal.SIGINT
_SAID = "Interrupted."


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


@contextmanager
def saying_interrupted() -> Iterator[None]:
    """Says that Ctrl-C ended the command, which typer does by its exit code alone."""
    try:
        yield
    except SystemExit as ending:
        if ending.code == INTERRUPTED:
            typer.echo(_SAID, err=True)
        raise


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Lets Ctrl-C end the process where there is nothing to clean up yet.

    Modules that are being imported swallow a `KeyboardInterrupt`, or make another error of it.
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
    """Reads `MegatronConfig.recompute`, `none` for nothing; raises `ConfigError` for another word."""
    modes = {"none" if mode is None else str(mode): mode for mode in CHOICES["recompute"]}
    if word not in modes:
        raise ConfigError(f"--recompute {word}: valid are {', '.join(modes)}.")
    return modes[word]


def layout_of_sizes(tp: int, sp: bool, cp: int, pp: int, ep: int) -> str:
    """Spells sizes as a layout, with the data parallel ranks that experts need beyond those of tp and cp."""
    experts = f"+dp{max(ep // (tp * cp), 1)}+ep{ep}" if ep > 1 else ""
    return f"tp{tp}" + ("+sp" if sp else "") + (f"+cp{cp}" if cp > 1 else "") + f"+pp{pp}" + experts

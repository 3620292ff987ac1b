"""Per-rank files `rank{N}.json`, each with a kind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..core.io.safe_paths import replace_file
from ..errors import ConfigError

T = TypeVar("T")
_KIND = "kind"


def rank_file(directory: Path, rank: int) -> Path:
    """Returns the path of a rank's file."""
    return directory / f"rank{rank:05}.json"


def write_rank_file(path: Path, kind: str, values: dict[str, Any]) -> None:
    """Writes a rank's file atomically: it appears when it is complete.

    Args:
        kind (`str`): type of the contents, such as `"trace"`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({_KIND: kind, **values})
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_json(path: Path, kind: str, make: Callable[[dict[str, Any]], T]) -> T:
    """Reads a file of the given kind, and returns `make(values)`.

    Raises:
        ConfigError: the file is damaged or of another kind.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is damaged: {error}") from error
    stored_kind = values.pop(_KIND, None) if isinstance(values, dict) else None
    if stored_kind != kind:
        raise ConfigError(
            f"{path}: is not a {kind}" + (f" but a {stored_kind}." if isinstance(stored_kind, str) else ".")
        )
    try:
        return make(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def read_rank_files(directory: Path, kind: str, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """Reads the files of all ranks in rank order; raises `ConfigError` as `read_json` does, and if there are none."""
    paths = sorted(directory.glob("rank*.json"))
    if not paths:
        raise ConfigError(f"{str(directory)!r}: has no file rank*.json with a {kind}.")
    return [read_json(path, kind, make) for path in paths]

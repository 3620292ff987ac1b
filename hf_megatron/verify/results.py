"""Recorded results: rows of `verified.json`, one per model class and kind of layout."""

import json
import os
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_VERSIONS = ("torch", "transformers", "accelerate", "hf_megatron")


def versions() -> dict[str, str]:
    """The versions a result was made with."""
    return {name: metadata.version(name) for name in _VERSIONS}


def write_results(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Merges rows into a results file; a row replaces the one of the same class, layout and size."""
    file = Path(path)
    old = json.loads(file.read_text(encoding="utf-8"))["results"] if file.exists() else []
    key = lambda row: (row["model_type"], row["class"], row["layout"], row.get("tp_size", 0), row.get("pp_size", 1))  # noqa: E731
    merged = {key(row): dict(row) for row in old} | {key(row): dict(row) for row in rows}
    ordered = [merged[name] for name in sorted(merged)]
    lines = ",\n".join("  " + json.dumps(row, sort_keys=True) for row in ordered)
    temporary = file.with_suffix(".tmp")
    temporary.write_text('{"results": [\n' + lines + "\n]}\n", encoding="utf-8")
    temporary.replace(file)

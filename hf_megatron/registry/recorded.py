"""Recorded parity results: which model classes passed on which kinds of layout."""

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from ..config import MegatronConfig

FILE = "verified.json"
_VERSIONS = ("torch", "transformers", "accelerate", "hf_megatron")


@cache
def records() -> tuple[dict[str, Any], ...]:
    """Reads the rows of `verified.json`, written by `hf-megatron check --record`."""
    text = resources.files("hf_megatron").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(json.loads(text)["results"])


def layout_kinds(config: MegatronConfig) -> list[str]:
    """Lists the kinds that a layout is made of, each with a result of its own: `tp` or `tp+sp`, and `pp`."""
    within_layers = "tp+sp" if config.sequence_parallel else "tp"
    return [within_layers] * (config.tp_size > 1) + ["pp"] * (config.pp_size > 1)


def layout_kind(config: MegatronConfig) -> str:
    """Names the kind of a layout, such as `tp+sp` or `tp+pp`."""
    return "+".join(layout_kinds(config))


def is_verified(class_name: str, model_type: str, config: MegatronConfig) -> bool:
    """Tells whether the model's type passed the check for every kind that this layout is made of."""
    rows = (row for row in records() if (row["model_type"], row["class"]) == (model_type, class_name))
    passed = {row["layout"] for row in rows if row["passed"]}
    return passed.issuperset(layout_kinds(config))


def tested_versions() -> dict[str, str]:
    """Returns the versions a result was made with."""
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

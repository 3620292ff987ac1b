"""Recorded parity results: which model classes passed on which kinds of layout."""

import json
from functools import cache
from importlib import resources
from typing import Any

from ..config import MegatronConfig

FILE = "verified.json"


@cache
def records() -> tuple[dict[str, Any], ...]:
    """The rows of `verified.json`, written by `hf-megatron check --record`."""
    text = resources.files("hf_megatron").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(json.loads(text)["results"])


def layout_kind(config: MegatronConfig) -> str:
    """The kind of a layout that one result stands for: `tp` or `tp+sp`."""
    return "tp+sp" if config.sequence_parallel else "tp"


def is_verified(class_name: str, model_type: str, config: MegatronConfig) -> bool:
    """Whether the model's type passed the check for this kind of layout."""
    kind = layout_kind(config)
    return any(
        row["model_type"] == model_type and row["class"] == class_name and row["layout"] == kind and row["passed"]
        for row in records()
    )

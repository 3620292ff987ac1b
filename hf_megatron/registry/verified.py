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


def layout_kinds(config: MegatronConfig) -> list[str]:
    """The kinds that a layout is made of, each with a result of its own: `tp` or `tp+sp`, and `pp`."""
    within_layers = "tp+sp" if config.sequence_parallel else "tp"
    return [within_layers] * (config.tp_size > 1) + ["pp"] * (config.pp_size > 1)


def layout_kind(config: MegatronConfig) -> str:
    """The kind of a layout, such as `tp+sp` or `tp+pp`."""
    return "+".join(layout_kinds(config))


def is_verified(class_name: str, model_type: str, config: MegatronConfig) -> bool:
    """Whether the model's type passed the check for every kind that this layout is made of."""
    passed = {
        row["layout"]
        for row in records()
        if row["model_type"] == model_type and row["class"] == class_name and row["passed"]
    }
    return passed.issuperset(layout_kinds(config))

"""Validation of an untrusted config.json before transformers parses it; upstream output is silenced."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..compat.transformers_loading import without_output
from ..compat.transformers_models import rope_types
from ..core.io.safe_paths import inside
from ..core.io.untrusted_json import read_json_table
from ..core.text import error_summary, safe_repr
from ..errors import CheckpointError

CONFIG = "config.json"
# The largest known ones have a megabyte, with names for 20,000 classes.
LARGEST_CONFIG = 8 << 20
_MOST_ENTRIES: Mapping[type, int] = {list: 10_000, dict: 100_000}
# Creating a layer takes a millisecond.
_MOST: Mapping[re.Pattern[str], int] = {re.compile(r"layers?$|^depths?$"): 2000, re.compile(r"_experts$"): 100_000}
_WIDTHS = frozenset(
    {"d_model", "hidden_size", "intermediate_size", "n_embd", "n_head", "num_attention_heads", "vocab_size"}
)
_SIZE = re.compile(r"_size$|^num_|^head_dim$")
_NUMBER = re.compile(r"^sliding_window$|^rope_theta$|factor$|_eps(ilon)?$")
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation")


def read_config(path: str | os.PathLike[str]) -> Any:
    """Reads the config of a folder without running code that it refers to.

    Raises:
        CheckpointError: it is not a transformers config, refers to custom code, or has implausible sizes; names the
            file and the setting.
    """
    import transformers

    file = inside(Path(path), CONFIG)
    table = read_json_table(file, LARGEST_CONFIG)
    if setting := next(_unsafe_settings(table, transformers.CONFIG_MAPPING), None):
        raise CheckpointError(f"{file}: {setting}.")
    try:
        with without_output():
            config = transformers.AutoConfig.from_pretrained(os.fspath(path), trust_remote_code=False)
            said = config.to_dict()
    except Exception as error:  # noqa: BLE001 - config classes raise arbitrary errors for invalid files
        raise CheckpointError(f"{file} cannot be read: {reason(table, error)}") from error
    if setting := next(_without_number(said), None):
        raise CheckpointError(f"{file}: {setting} is NaN: expected a number.")
    # Auto classes would otherwise look up custom code again when they use the config.
    vars(config).pop("auto_map", None)
    return config


def reason(table: Mapping[str, Any], error: Exception) -> str:
    """Returns the reason for an error: an impossible setting if there is one, as upstream errors may not name it."""
    return next(_impossible(table), error_summary(error))


def settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting with its full name, containers before their contents."""
    pending = [(name, value)]
    while pending:
        name, value = pending.pop()
        if name:
            yield name, value
        if isinstance(value, dict):
            pending += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(name, inner) for inner in value]


def _unsafe_settings(table: Mapping[str, Any], known: Any) -> Iterator[str]:
    """Yields the settings for which a config is rejected."""
    kind = table.get("model_type")
    if table.get("auto_map") and not (isinstance(kind, str) and kind in known):
        yield (
            f"auto_map specifies custom code for model_type {safe_repr(kind)}, which is not executed: expected a model "
            "type of transformers"
        )
    if table.get("configuration_files"):
        yield "configuration_files lists replacement configs, which are not read: rename the one to use to config.json"
    for name, value in settings(table):
        key = name.rpartition(".")[2]
        most = _MOST_ENTRIES.get(type(value))
        if most is not None and len(value) > most:
            yield f"{safe_repr(name)} has {len(value)} entries; the limit is {most}"
        elif isinstance(value, str) and _IMPLEMENTATION.search(name) and "/" in value:
            # A kernel of the Hub would be downloaded and run.
            yield (
                f"{safe_repr(name)} is {safe_repr(value)}, code from the Hub, which is not executed: expected a name "
                "such as 'sdpa'"
            )
        elif type(value) is int:
            if not value and key in _WIDTHS:
                yield f"{safe_repr(name)} is 0: expected 1 or more"
            for pattern, most in _MOST.items():
                if value > most and pattern.search(key):
                    yield f"{safe_repr(name)} is {safe_repr(value)}, more than {most}"


def _impossible(table: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings that are impossible for any model and not checked by transformers."""
    for name, value in settings(table):
        key = name.rpartition(".")[2]
        if key in ("dtype", "torch_dtype") and value is not None:
            named = getattr(torch, str(value).removeprefix("torch."), None)
            if not isinstance(value, str) or not isinstance(named, torch.dtype):
                yield f"{safe_repr(name)} is {safe_repr(value)}: expected a torch dtype, such as 'bfloat16'"
        elif key == "rope_type" and not (isinstance(value, str) and value in rope_types()):
            yield f"{safe_repr(name)} is {safe_repr(value)}: expected {', '.join(sorted(rope_types()))}"
        elif isinstance(value, int) and value < 0 and _SIZE.search(key):
            yield f"{safe_repr(name)} is {safe_repr(value)}: expected a size"
        elif not isinstance(value, (int, float, type(None))) and _NUMBER.search(key):
            kind = "the string " if isinstance(value, str) else ""
            yield f"{safe_repr(name)} is {kind}{safe_repr(value)}: expected a number"


def _without_number(table: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of settings that are NaN."""
    for name, value in settings(table):
        if isinstance(value, float) and math.isnan(value):
            yield safe_repr(name)

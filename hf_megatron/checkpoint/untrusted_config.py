"""A config.json that a stranger may have written: looked at before transformers makes anything of it, in silence."""

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
# The largest have a megabyte, of a name for each of 20,000 classes.
LARGEST_CONFIG = 8 << 20
_MOST_ENTRIES: Mapping[type, int] = {list: 10_000, dict: 100_000}
# A layer takes a millisecond to make.
_MOST: Mapping[re.Pattern[str], int] = {re.compile(r"layers?$|^depths?$"): 2000, re.compile(r"_experts$"): 100_000}
_WIDTHS = frozenset(
    {"d_model", "hidden_size", "intermediate_size", "n_embd", "n_head", "num_attention_heads", "vocab_size"}
)
_SIZE = re.compile(r"_size$|^num_|^head_dim$")
_NUMBER = re.compile(r"^sliding_window$|^rope_theta$|factor$|_eps(ilon)?$")
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation")


def read_config(path: str | os.PathLike[str]) -> Any:
    """Reads the config of a folder, and runs no code that it names.

    Raises:
        CheckpointError: naming the file and the setting, for what is no config of transformers, names code outside of
            it, or has sizes that no model has.
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
    except Exception as error:  # noqa: BLE001 - what a config class makes of a file that is none of its own
        raise CheckpointError(f"{file} cannot be read: {reason(table, error)}") from error
    if setting := next(_without_number(said), None):
        raise CheckpointError(f"{file}: {setting} is NaN: expected a number.")
    # What is made of it by an Auto class later on would ask for it again.
    vars(config).pop("auto_map", None)
    return config


def reason(table: Mapping[str, Any], error: Exception) -> str:
    """Says what in a config led to an error: the setting, where it is one whose errors do not name it."""
    return next(_impossible(table), error_summary(error))


def settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting with its full name, tables and lists before what is in them."""
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
    """Yields the settings for which nothing is made of a config."""
    kind = table.get("model_type")
    if table.get("auto_map") and not (isinstance(kind, str) and kind in known):
        yield (
            f"auto_map names code of its own for model_type {safe_repr(kind)}, which is not run: expected a model "
            f"type of "
            "transformers"
        )
    if table.get("configuration_files"):
        yield "configuration_files names other configs in its place, which are not read: rename the one that counts"
    for name, value in settings(table):
        key = name.rpartition(".")[2]
        most = _MOST_ENTRIES.get(type(value))
        if most is not None and len(value) > most:
            yield f"{safe_repr(name)} has {len(value)} entries: no more than {most} are read"
        elif isinstance(value, str) and _IMPLEMENTATION.search(name) and "/" in value:
            # One of the Hub's kernels would be fetched and run.
            yield f"{safe_repr(name)} is {safe_repr(value)}, code of the Hub, which is not run: expected a name "
            "such as 'sdpa'"
        elif type(value) is int:
            if not value and key in _WIDTHS:
                yield f"{safe_repr(name)} is 0: expected 1 or more"
            for pattern, most in _MOST.items():
                if value > most and pattern.search(key):
                    yield f"{safe_repr(name)} is {safe_repr(value)}, more than {most}"


def _impossible(table: Mapping[str, Any]) -> Iterator[str]:
    """Yields the settings that no model can have and that transformers does not check."""
    for name, value in settings(table):
        key = name.rpartition(".")[2]
        if key in ("dtype", "torch_dtype") and value is not None:
            named = getattr(torch, str(value).removeprefix("torch."), None)
            if not isinstance(value, str) or not isinstance(named, torch.dtype):
                yield f"{safe_repr(name)} is {safe_repr(value)}: expected a type of torch, such as 'bfloat16'"
        elif key == "rope_type" and not (isinstance(value, str) and value in rope_types()):
            yield f"{safe_repr(name)} is {safe_repr(value)}: expected {', '.join(sorted(rope_types()))}"
        elif isinstance(value, int) and value < 0 and _SIZE.search(key):
            yield f"{safe_repr(name)} is {safe_repr(value)}: expected a size"
        elif not isinstance(value, (int, float, type(None))) and _NUMBER.search(key):
            kind = "the text " if isinstance(value, str) else ""
            yield f"{safe_repr(name)} is {kind}{safe_repr(value)}: expected a number"


def _without_number(table: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of settings that are NaN."""
    for name, value in settings(table):
        if isinstance(value, float) and math.isnan(value):
            yield safe_repr(name)

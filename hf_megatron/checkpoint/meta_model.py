"""The model of a checkpoint without its weights: what its config.json says, on the meta device."""

import copy
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..files.json_file import read_json_table
from ..files.paths import is_file
from ..shown import first_line, shown
from ..upstream import rope_types

# Each takes a millisecond to make.
_MOST_LAYERS = 2000
_SIZE = re.compile(r"_size$|^num_|^head_dim$")


def meta_model(model_class: Any, config: Any) -> Any:
    """Makes an instance of a class of transformers on the meta device."""
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config))


def meta_model_of(path: str | os.PathLike[str]) -> Any:
    """Makes the model of a folder; `CheckpointError` where its config.json is missing or names no class."""
    import transformers

    file = Path(path) / "config.json"
    if not is_file(file):
        raise CheckpointError(
            f"{path} has no config.json, so its architecture is not known: name with --config a folder or a model of "
            "the Hub that has one."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(os.fspath(path))
    except Exception as error:  # noqa: BLE001 - what a config class makes of a file that is none of its own
        raise CheckpointError(f"{file} cannot be read: {_reason(file, error)}") from error
    if setting := next(_without_number(config.to_dict()), None):
        raise CheckpointError(f"{file}: {setting} is NaN: expected a number.")
    names = config.architectures or []
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    model_class = getattr(transformers, names[0], None) if is_one else None
    if not isinstance(model_class, type):
        raise CheckpointError(f"{file} names the architectures {shown(names)}: expected one class of transformers.")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise CheckpointError(f"{file}: num_hidden_layers is {shown(layers)}, more than {_MOST_LAYERS}.")
    try:
        return meta_model(model_class, config)
    except Exception as error:  # noqa: BLE001 - a model class, of sizes that it was not made for
        raise CheckpointError(f"{file} makes no {names[0]}: {_reason(file, error)}") from error


def _reason(file: Path, error: Exception) -> str:
    """Says what in a config.json led to an error: the setting, where it is one whose errors do not name it."""
    return next(_impossible(read_json_table(file)), first_line(error))


def _impossible(value: Any, name: str = "") -> Iterator[str]:
    """Yields the settings that no model can have and that transformers does not check."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _impossible(inner, f"{name}.{key}" if name else str(key))
        return
    key = name.rpartition(".")[2]
    if key in ("dtype", "torch_dtype") and value is not None:
        named = getattr(torch, str(value).removeprefix("torch."), None)
        if not isinstance(value, str) or not isinstance(named, torch.dtype):
            yield f"{shown(name)} is {shown(value)}: expected a type of torch, such as 'bfloat16'"
    elif key == "rope_type" and value not in rope_types():
        yield f"{shown(name)} is {shown(value)}: expected {', '.join(sorted(rope_types()))}"
    elif isinstance(value, int) and value < 0 and _SIZE.search(key):
        yield f"{shown(name)} is {shown(value)}: expected a size"


def _without_number(value: Any, name: str = "") -> Iterator[str]:
    """Yields the names of settings that are NaN."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _without_number(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _without_number(inner, name)
    elif isinstance(value, float) and math.isnan(value):
        yield shown(name)

"""The model of a checkpoint without its weights: what its config.json says, on the meta device."""

import copy
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..files.paths import is_file
from ..shown import shown
from ..upstream import without_output
from .config_file import CONFIG, read_config, reason


def meta_model(model_class: Any, config: Any) -> Any:
    """Makes an instance of a class of transformers on the meta device."""
    with torch.device("meta"), without_output():
        return model_class._from_config(copy.deepcopy(config))


def meta_model_of(path: str | os.PathLike[str]) -> Any:
    """Makes the model of a folder; `CheckpointError` where its config.json is missing or names no class."""
    import transformers

    file = Path(path) / CONFIG
    if not is_file(file):
        raise CheckpointError(
            f"{path} has no config.json, so its architecture is not known: name with --config a folder or a model of "
            "the Hub that has one."
        )
    config = read_config(path)
    names = config.architectures or []
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    model_class = getattr(transformers, names[0], None) if is_one else None
    if not isinstance(model_class, type):
        raise CheckpointError(f"{file} names the architectures {shown(names)}: expected one class of transformers.")
    try:
        return meta_model(model_class, config)
    except Exception as error:  # noqa: BLE001 - a model class, of sizes that it was not made for
        raise CheckpointError(f"{file} makes no {names[0]}: {reason(config.to_dict(), error)}") from error

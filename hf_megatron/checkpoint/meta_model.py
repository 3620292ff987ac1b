"""The model of a checkpoint without its weights: what its config.json says, on the meta device."""

import copy
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


def meta_model(model_class: Any, config: Any) -> Any:
    """Makes an instance of a class of transformers on the meta device."""
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config))


def meta_model_of(path: str | os.PathLike[str]) -> Any:
    """Makes the model of a folder; `CheckpointError` where its config.json is missing or names no class."""
    import transformers

    file = Path(path) / "config.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no config.json, so its architecture is not known: name with --config a folder or a model of "
            "the Hub that has one."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(os.fspath(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if len(names) == 1 else None
    if not isinstance(model_class, type):
        raise CheckpointError(f"{file} names the architectures {names}: expected one class of transformers.")
    return meta_model(model_class, config)

"""The model of a checkpoint without its weights: what its config.json says, on the meta device."""

import copy
import os
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


def meta_model(model_class: Any, config: Any) -> Any:
    """An instance of a class of transformers on the meta device."""
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(config))


def meta_model_of(path: str | os.PathLike[str]) -> Any:
    """The model of a folder with a config.json.

    Raises:
        CheckpointError: there is no config.json, or it names no class of transformers.
    """
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
    if len(names) != 1 or not isinstance(getattr(transformers, names[0], None), type):
        raise CheckpointError(f"{file} names the architectures {names}: expected one class of transformers.")
    return meta_model(getattr(transformers, names[0]), config)

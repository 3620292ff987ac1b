"""Instantiates the model of a checkpoint's config.json on the meta device, without weights."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from ..compat.transformers_loading import without_output
from ..core.io.safe_paths import is_file
from ..core.io.safetensors import MOST_TENSORS
from ..core.text import safe_repr
from ..errors import CheckpointError
from .untrusted_config import CONFIG, read_config, reason


def meta_model(model_class: Any, config: Any) -> Any:
    """Instantiates a transformers class on the meta device."""
    with torch.device("meta"), without_output(), _few_modules():
        return model_class._from_config(copy.deepcopy(config))


@contextmanager
def _few_modules() -> Iterator[None]:
    """Raises if a model creates more than `MOST_TENSORS` modules; each of them takes a tenth of a millisecond."""
    counted = count(1)

    def check(*registered: object) -> None:
        if next(counted) > MOST_TENSORS:
            raise CheckpointError(f"it has more than {MOST_TENSORS} modules")

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def load_meta_model(path: str | os.PathLike[str]) -> Any:
    """Instantiates the model of a folder; `CheckpointError` if its config.json is missing or specifies no class."""
    import transformers

    file = Path(path) / CONFIG
    if not is_file(file):
        raise CheckpointError(
            f"{path} has no config.json, so the architecture is unknown. Put the model's config.json there; `convert` "
            "and `compare` also read it from a folder or a Hub model passed as --config (config=)."
        )
    config = read_config(path)
    names = config.architectures or []
    is_one = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    model_class = getattr(transformers, names[0], None) if is_one else None
    if not isinstance(model_class, type):
        raise CheckpointError(f"{file} lists the architectures {safe_repr(names)}: expected one transformers class.")
    try:
        return meta_model(model_class, config)
    except Exception as error:  # noqa: BLE001 - model classes raise arbitrary errors for unusual sizes
        raise CheckpointError(
            f"{file} does not define a valid {names[0]}: {reason(config.to_dict(), error)}"
        ) from error

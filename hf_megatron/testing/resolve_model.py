"""Config and parallel plan of a model given on the command line by model type, folder or hub name."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..checkpoint.untrusted_config import CONFIG, read_config
from ..compat.transformers_loading import without_output
from ..config import MegatronConfig
from ..core.axes import Axes
from ..core.text import error_summary
from ..errors import CheckpointError, ConfigError
from ..models.auto_class import auto_class
from ..parallelize import ParallelPlan, plan


def resolve_config(model: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Returns the config of a model type, folder or hub name, with changes; raises `ConfigError` for invalid ones."""
    known = not Path(model).exists() and model in CONFIG_MAPPING
    if model.startswith((".", os.sep)) and not Path(model).exists():
        raise ConfigError(f"MODEL = {model!r}: the folder does not exist.")
    try:
        config = CONFIG_MAPPING[model]() if known else read_config(_get_folder(model))
    except CheckpointError as error:
        raise ConfigError(f"MODEL = {model!r} has no readable config: {error}") from error
    except Exception as error:  # noqa: BLE001 - whatever keeps the Hub's file from being fetched
        raise ConfigError(_describe_unreadable(model, error)) from error
    if not changes:
        return config
    try:
        return type(config).from_dict(config.to_dict() | dict(changes))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{model} with {dict(changes)}: {error}") from error


def _describe_unreadable(model: str, error: Exception) -> str:
    if "/" in model or Path(model).exists():
        return f"MODEL = {model!r} has no readable config: {error_summary(error)}"
    similar = get_close_matches(model, CONFIG_MAPPING, n=1)
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    return f"MODEL = {model!r} is not a model type or a folder, and the Hub has no readable config for it.{hint}"


def _get_folder(model: str) -> str | Path:
    """Returns a local folder unchanged, or the cache folder of a hub model's config.json."""
    return model if Path(model).exists() else Path(hf_hub_download(model, CONFIG)).parent


def print_plan(model: str, layout: MegatronConfig) -> str:
    """Returns the text of a full-size model's plan on a layout, made on the meta device without weights and ranks.

    The model class is the one in `config.architectures`, or else the class with a loss on tokens, see `auto_class`.

    Raises:
        ConfigError: the config cannot be read, or no model can be built from it.
    """
    config = resolve_config(model)
    instance = build_on_meta(model, config)
    state = plan(instance, layout, Axes.of(layout, 0))
    return str(ParallelPlan(state.shardings.values(), state.cut))


def build_on_meta(model: str, config: PreTrainedConfig) -> Any:
    """Builds the class in `config.architectures`, or the one with a loss on tokens, on the meta device.

    Raises:
        ConfigError: no model can be built from the config.
    """
    names = config.architectures or []
    named = getattr(transformers, names[0], None) if len(names) == 1 and isinstance(names[0], str) else None
    make = auto_class(config).from_config if named is None else named._from_config
    try:
        with torch.device("meta"), without_output():
            return make(config)
    except Exception as error:  # noqa: BLE001 - a model class, of sizes that it was not made for
        raise ConfigError(
            f"MODEL = {model!r}: the model cannot be built from its config: {error_summary(error)}"
        ) from error

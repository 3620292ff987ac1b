"""Model that is planned, on the meta device, and the execution order of its layers."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..compat.transformers_loading import without_output
from ..core.text import error_summary
from ..errors import ConfigError, UnsupportedError
from ..models.auto_class import auto_class
from ..models.fingerprint import describe_model
from ..models.layers import LayerSequence
from ..models.registry import spec_for

_TOKENS = "input_ids"


def model_on_meta(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns the planned model without weights; buffers that follow the weights' dtype have `dtype`.

    Raises:
        ConfigError: transformers has no model for the config, or it reads no tokens.
    """
    auto = auto_class(config)
    try:
        with torch.device("meta"), without_output():
            model = auto.from_config(config, dtype=dtype)
    except Exception as error:  # noqa: BLE001 - model classes raise errors of any type for a bad config
        raise ConfigError(
            f"MODEL of type {config.model_type!r}: the model cannot be built from its config: {error_summary(error)}"
        ) from error
    if model.main_input_name != _TOKENS:
        raise ConfigError(
            f"MODEL of type {config.model_type!r}: {type(model).__name__} reads {model.main_input_name}; planning "
            "supports only token sequences."
        )
    return model


def layers_in_order(model: Any) -> list[tuple[str, ...]]:
    """Returns the module names of each layer, in execution order, encoder layers first.

    These are the layers that a pipeline splits; if the model does not support one, entries with the same index in all
    module lists form a layer.
    """
    try:
        row = LayerSequence.of(model, spec_for(model), "pp_size")
    except UnsupportedError:
        return _by_number(describe_model(model).layers({}))
    return [row.get_layer_modules(layer) for layer in range(len(row.names))]


def _by_number(names: Iterable[str]) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[2], []).append(name)
    return [*map(tuple, groups.values())]

"""Multi-token prediction (MTP) layers after the last decoder layer: `MtpLayer` in transformers, `mtp` in Megatron-Core.

transformers builds them outside the model, and only for `generate(use_mtp=True)`. In its files their layer indices
continue the decoder layers' indices, and each has three additional modules.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..compat.transformers_loading import without_output
from ..compat.transformers_models import make_mtp_layer
from ..core.text import safe_repr
from ..errors import CheckpointError
from .architecture import Architecture

# Present in MTP layers only: the projection of the next token's embedding and the hidden state.
_PROJECTION = re.compile(r"(?:^|\.)(?P<mtp>mtp\.)?layers\.(?P<number>\d{1,9})\.eh_proj\.weight")
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(?P<number>\d{1,9})\.(?P<rest>.+)")
# Copies of the model's own weights in the files of MTP layers (`_keys_to_ignore_on_load_unexpected` of `MtpModel`).
_REPEATED: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "embed_tokens.weight": lambda model: model.get_input_embeddings(),
        "shared_head.head.weight": lambda model: model.get_output_embeddings(),
    }
)


def repeated_names(names: Iterable[str], architecture: Architecture) -> dict[str, str]:
    """Maps names under which the files of MTP layers repeat a weight of the model to that weight's name."""
    if not architecture.num_mtp_layers:
        return {}
    model, weight_names = architecture.model, {}
    of_weight = {id(weight): name for name, weight in model.named_parameters()}
    for name in names:
        match = _IN_LAYER.search(name)
        if match and match["rest"] in _REPEATED and int(match["number"]) >= architecture.config.num_hidden_layers:
            weight_names[name] = of_weight[id(_REPEATED[match["rest"]](model).weight)]
    return weight_names


def mtp_weight_names(names: Collection[str], config: Any) -> set[str]:
    """Returns the names in Hugging Face files that belong to MTP layers."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    projected = {match["number"] for name in names if (match := _PROJECTION.search(name)) and not match["mtp"]}
    return {
        name
        for name in names
        if (match := _IN_LAYER.search(name)) and match["number"] in projected and int(match["number"]) >= (layers or 0)
    }


def count_mtp_layers(names: Iterable[str], config: Any) -> int:
    """Counts MTP layers by tensor names, of Megatron or of Hugging Face files.

    Raises:
        CheckpointError: their indices are not consecutive from the first one.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    layer_ids = {(match["mtp"], int(match["number"])) for name in names if (match := _PROJECTION.search(name))}
    layer_indices = sorted(number if mtp or layers is None else number - layers for mtp, number in layer_ids)
    if layer_indices != list(range(len(layer_indices))):
        raise CheckpointError(
            f"The layers of multi-token prediction after the config's last layer have indices "
            f"{safe_repr(layer_indices)}, "
            f"expected {len(layer_indices)} from 0 on. Use --without-mtp (without_mtp=True) to leave them out."
        )
    return len(layer_indices)


def include_mtp(architecture: Architecture, count: int) -> Architecture | None:
    """Returns an architecture with multi-token prediction layers, `None` if its class has none.

    Raises:
        CheckpointError: the config has a different number of them.
    """
    with torch.device("meta"), without_output():
        layers = [make_mtp_layer(architecture.model, number) for number in range(count)]
    if None in layers:
        return None
    config = architecture.config.get_text_config()
    configured = config.num_mtp_layers
    if configured != count:
        name = config.attribute_map.get("num_mtp_layers", "num_mtp_layers")
        raise CheckpointError(
            f"The checkpoint has {count} layers of multi-token prediction, but {name} is {configured} in the config. "
            "Correct config.json, or use --without-mtp (without_mtp=True) to leave them out."
        )
    return architecture.include_mtp(layers)

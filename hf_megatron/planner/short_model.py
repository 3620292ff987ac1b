"""A model with fewer layers that has every kind of them, by which a long one is measured."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..errors import ConfigError
from ..registry.features import describe_model
from ..shown import first_line
from ..upstream import without_output
from .training import WHOLE, Training

# What two layers agree in that cost the same.
_Kind = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class ShortModel:
    """Layers that stand for those of a longer model.

    Attributes:
        config: of the short one; the model's own where none has the same layers.
        model: the short one, on the meta device.
        layers: for each layer of the long model, the layer of the short one that is like it.
        names: of the short model's layers, in their order; one tuple for each, of all that its parts are called.
    """

    config: PreTrainedConfig
    model: Any
    layers: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]

    @property
    def unit_of_module(self) -> dict[str, int]:
        """Module that is a layer or a part of one -> the layer's number."""
        return {name: number for number, names in enumerate(self.names) for name in names}


def shorten(config: PreTrainedConfig, training: Training = WHOLE) -> ShortModel:
    """Returns the shortest beginning of a causal model's layers that has every kind of them.

    Args:
        training (`Training`, *optional*): what of the model is trained: layers of which other parts are frozen are
            other kinds, and so are those before anything that is trained, which no gradient reaches.

    Raises:
        ConfigError: no causal language model can be made of the config, or nothing of it is trained.
    """
    model = causal_model_on_meta(config)
    training.freeze(model)
    names, kinds = _row_of(model, training)
    if not names:
        raise ConfigError(f"{type(model).__name__} has no list of layers to plan by.")
    first: dict[_Kind, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    layers = tuple(first[kind] for kind in kinds)
    # Some layers read what the first one has made, as a mask: two at least.
    for length in range(max(2, 1 + max(first.values())), len(kinds)):
        short = _with_layers(config, len(kinds), length)
        if short is None:
            break
        other = causal_model_on_meta(short)
        training.freeze(other)
        other_names, other_kinds = _row_of(other, training)
        if other_kinds == kinds[:length]:
            return ShortModel(short, other, layers, tuple(other_names))
    return ShortModel(config, model, layers, tuple(names))


def causal_model_on_meta(config: PreTrainedConfig) -> Any:
    """Makes a causal language model without weights; raises `ConfigError` where there is none."""
    try:
        with torch.device("meta"), without_output():
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - whatever a model class says of its config
        raise ConfigError(
            f"MODEL of type {config.model_type!r}: no causal language model can be made of it: {first_line(error)}"
        ) from error


def _row_of(model: Any, training: Training) -> tuple[list[tuple[str, ...]], list[_Kind]]:
    """Returns the names of each layer's parts, and what it costs by: modules, shapes, and what of it is trained."""
    names: dict[str, list[str]] = {}
    parts: dict[str, list[Any]] = {}
    embedding = model.get_input_embeddings()
    reached = any(parameter.requires_grad for parameter in embedding.parameters())
    for name, part in describe_model(model).layers({}).items():
        number = name.rpartition(".")[2]
        names.setdefault(number, []).append(name)
        module: nn.Module = model.get_submodule(name)
        shapes = tuple((own, tuple(p.shape), p.requires_grad) for own, p in module.named_parameters())
        parts.setdefault(number, []).append((part, shapes, reached))
        reached = reached or training.lora_rank > 0 or any(p.requires_grad for p in module.parameters())
    return [tuple(found) for found in names.values()], [tuple(found) for found in parts.values()]


def _with_layers(config: PreTrainedConfig, layers: int, fewer: int) -> PreTrainedConfig | None:
    """Returns the config with fewer layers, and lists of so many entries cut; `None` where it does not count them."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    if getattr(text, "num_hidden_layers", None) != layers:
        return None
    for name, value in _lists(text, layers):
        setattr(text, name, value[:fewer])
    text.num_hidden_layers = fewer
    return short


def _lists(config: PreTrainedConfig, length: int) -> Iterator[tuple[str, Sequence[Any]]]:
    yield from (
        (name, value)
        for name, value in [*vars(config).items()]
        if isinstance(value, (list, tuple)) and len(value) == length
    )

"""A model with fewer layers that has every kind of them, by which a long one is measured."""

import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..config import MegatronConfig
from ..core.axes import Axes
from ..errors import ConfigError, MegatronError
from ..integrations.transformers.verification_gate import why_unverified
from ..models.fingerprint import describe_model
from ..models.registry import spec_for
from ..models.type_facts import batch_coupling_reason
from ..parallelize import plan
from ..pipeline_parallel.support_checks import row_to_cut
from .model_class import layers_in_order, model_on_meta
from .training import WHOLE, Training

# What two layers agree in that cost the same.
_Kind = tuple[Any, ...]
_LAYERS = re.compile(r"^(num|n|encoder|decoder)_.*layers?$|_layers$")


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


def shorten(config: PreTrainedConfig, training: Training = WHOLE, dtype: torch.dtype = torch.bfloat16) -> ShortModel:
    """Returns the shortest beginning of a model's layers that has every kind of them.

    Args:
        training (`Training`, *optional*): what of the model is trained: layers of which other parts are frozen are
            other kinds, and so are those before anything that is trained, which no gradient reaches.
        dtype (`torch.dtype`, defaults to bf16): of the weights.

    Raises:
        ConfigError: no model that reads tokens can be made of the config, or nothing of it is trained.
    """
    model = model_on_meta(config, dtype)
    training.freeze(model)
    names, kinds = _row_of(model, training)
    if not names:
        raise ConfigError(f"{type(model).__name__} has no list of layers to plan by.")
    stacks = _stacks(names)
    # Some layers read what the first one has made, as a mask: two at least.
    least = max(2, *(1 + max(map(kinds[stack].index, kinds[stack])) for stack in stacks))
    for length in range(least, max(stack.stop - stack.start for stack in stacks)):
        short = _with_layers(config, {stack.stop - stack.start for stack in stacks}, length)
        if short is None:
            break
        other = model_on_meta(short, dtype)
        training.freeze(other)
        other_names, other_kinds = _row_of(other, training)
        if other_kinds == [kind for stack in stacks for kind in kinds[stack][:length]]:
            return ShortModel(short, other, tuple(map(other_kinds.index, kinds)), tuple(other_names))
    return ShortModel(config, model, tuple(map(kinds.index, kinds)), tuple(names))


def _stacks(names: Sequence[tuple[str, ...]]) -> list[slice]:
    """Returns where the layers of each list are, those of an encoder and of its decoder."""
    found, start = [], 0
    for _, layers in itertools.groupby(names, lambda parts: parts[-1].rpartition(".")[0]):
        found.append(slice(start, start := start + len([*layers])))
    return found


def _row_of(model: Any, training: Training) -> tuple[list[tuple[str, ...]], list[_Kind]]:
    """Returns the names of each layer's parts, and what it costs by: modules, shapes, and what of it is trained."""
    names, described = layers_in_order(model), describe_model(model).layers({})
    embedding = model.get_input_embeddings()
    reached = any(parameter.requires_grad for parameter in embedding.parameters())
    kinds = []
    for parts in names:
        kind = []
        for name in parts:
            module: nn.Module = model.get_submodule(name)
            shapes = tuple((own, tuple(p.shape), p.requires_grad) for own, p in module.named_parameters())
            kind.append((described.get(name, type(module)), shapes, reached))
            reached = reached or training.lora_rank > 0 or any(p.requires_grad for p in module.parameters())
        kinds.append(tuple(kind))
    return names, kinds


def _with_layers(config: PreTrainedConfig, lengths: set[int], fewer: int) -> PreTrainedConfig | None:
    """Returns the config with fewer layers, and lists of so many entries cut; `None` where it does not count them.

    Args:
        lengths: how many the stacks of the model have.
    """
    short = copy.deepcopy(config)
    text = short if config.is_encoder_decoder else short.get_text_config()
    names = [
        name
        for name, value in vars(text).items()
        if _LAYERS.search(name) and isinstance(value, int) and value in lengths
    ]
    if not names:
        return None
    for name, value in [*vars(text).items()]:
        if isinstance(value, (list, tuple)) and len(value) in lengths:
            setattr(text, name, value[:fewer])
    for name in names:
        setattr(text, name, fewer)
    return short


def why_not_cut(short: ShortModel, layout: MegatronConfig) -> str:
    """Returns why a pipeline, or its schedule, cannot have the model; nothing if it can."""
    model = short.model
    try:
        row_to_cut(model, spec_for(model), layout, Axes.of(layout, 0))
    except MegatronError as error:
        return str(error)
    return batch_coupling_reason(model.config) or ""


def without_pipeline(layout: MegatronConfig) -> MegatronConfig:
    """Returns a layout with one stage, whose other axes split a layer in the same way."""
    return replace(layout, pp_size=1, pipeline_schedule="1f1b", virtual_stages=None, num_microbatches=None)


def what_was_not_compared(short: ShortModel, layout: MegatronConfig) -> list[str]:
    """Returns for what kinds of the layout loading asks for a check first, and why; nothing where all was compared."""
    model = copy.deepcopy(short.model)
    description = describe_model(model)
    flat = without_pipeline(layout)
    return why_unverified(model, layout, plan(model, flat, Axes.of(flat, 0)), description)

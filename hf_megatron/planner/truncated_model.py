"""Truncated model: a model with fewer layers but every kind of layer, measured in place of the full one."""

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
from ..models.fingerprint import describe_model
from ..models.registry import spec_for
from ..models.type_facts import batch_coupling_reason
from ..models.verification_gate import find_gaps
from ..parallelize import plan
from ..pipeline_parallel.support_checks import row_to_cut
from .model_class import layers_in_order, model_on_meta
from .training import WHOLE, Training

# Key of a layer; layers with equal keys cost the same.
_Kind = tuple[Any, ...]
_LAYERS = re.compile(r"^(num|n|encoder|decoder)_.*layers?$|_layers$")


@dataclass(frozen=True, eq=False)
class ShortModel:
    """Truncated model with layers that represent all layers of the full model.

    Attributes:
        config: of the truncated model; of the full model if no shorter one has the same layers.
        model: the truncated model, on the meta device.
        layers: for each layer of the full model, the index of the equivalent layer of the truncated one.
        names: for each layer of the truncated model, the names of its modules.
    """

    config: PreTrainedConfig
    model: Any
    layers: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]

    @property
    def unit_by_module(self) -> dict[str, int]:
        """Module that is a layer or a part of one -> index of the layer."""
        return {name: number for number, names in enumerate(self.names) for name in names}


def shorten(config: PreTrainedConfig, training: Training = WHOLE, dtype: torch.dtype = torch.bfloat16) -> ShortModel:
    """Returns the model truncated to the shortest prefix of its layers that has every kind of layer.

    Args:
        training (`Training`, *optional*): trained parts of the model. Layers with other frozen parameters are another
            kind, and so are layers before all trained parameters, which no gradient reaches.
        dtype (`torch.dtype`, defaults to bf16): of the weights.

    Raises:
        ConfigError: no model that reads tokens can be made of the config, or nothing of it is trained.
    """
    model = model_on_meta(config, dtype)
    training.freeze(model)
    names, kinds = _describe_layers(model, training)
    if not names:
        raise ConfigError(f"{type(model).__name__} has no layer list, which planning requires.")
    stacks = _stacks(names)
    # At least two: some layers read what the first one has computed, such as a mask.
    least = max(2, *(1 + max(map(kinds[stack].index, kinds[stack])) for stack in stacks))
    for length in range(least, max(stack.stop - stack.start for stack in stacks)):
        short = _with_layers(config, {stack.stop - stack.start for stack in stacks}, length)
        if short is None:
            break
        other = model_on_meta(short, dtype)
        training.freeze(other)
        other_names, other_kinds = _describe_layers(other, training)
        if other_kinds == [kind for stack in stacks for kind in kinds[stack][:length]]:
            return ShortModel(short, other, tuple(map(other_kinds.index, kinds)), tuple(other_names))
    return ShortModel(config, model, tuple(map(kinds.index, kinds)), tuple(names))


def _stacks(names: Sequence[tuple[str, ...]]) -> list[slice]:
    """Returns the range of each layer list, for example of the encoder and of the decoder."""
    stacks, start = [], 0
    for _, layers in itertools.groupby(names, lambda parts: parts[-1].rpartition(".")[0]):
        stacks.append(slice(start, start := start + len([*layers])))
    return stacks


def _describe_layers(model: Any, training: Training) -> tuple[list[tuple[str, ...]], list[_Kind]]:
    """Returns the module names of each layer, and its key: modules, shapes, and trained parameters."""
    names, described = layers_in_order(model), describe_model(model).layers({})
    embedding = model.get_input_embeddings()
    reached = any(parameter.requires_grad for parameter in embedding.parameters())
    kinds = []
    for parts in names:
        kind = []
        for name in parts:
            module: nn.Module = model.get_submodule(name)
            shapes = tuple((param_name, tuple(p.shape), p.requires_grad) for param_name, p in module.named_parameters())
            kind.append((described.get(name, type(module)), shapes, reached))
            reached = reached or training.lora_rank > 0 or any(p.requires_grad for p in module.parameters())
        kinds.append(tuple(kind))
    return names, kinds


def _with_layers(config: PreTrainedConfig, lengths: set[int], fewer: int) -> PreTrainedConfig | None:
    """Returns the config with fewer layers and truncated per-layer lists; `None` if it has no layer count.

    Args:
        lengths: numbers of layers of the model's stacks.
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
    """Returns why a pipeline or its schedule does not support the model; empty if it does."""
    model = short.model
    try:
        row_to_cut(model, spec_for(model), layout, Axes.of(layout, 0))
    except MegatronError as error:
        return str(error)
    return batch_coupling_reason(model.config) or ""


def without_pipeline(layout: MegatronConfig) -> MegatronConfig:
    """Returns a layout with one stage and the same other axes."""
    return replace(layout, pp_size=1, pipeline_schedule="1f1b", virtual_stages=None, num_microbatches=None)


def what_was_not_compared(short: ShortModel, layout: MegatronConfig) -> list[str]:
    """Returns the parts of the layout without a recorded parity result, which loading compares first."""
    model = copy.deepcopy(short.model)
    description = describe_model(model)
    flat = without_pipeline(layout)
    return [str(gap) for gap in find_gaps(model, layout, plan(model, flat, Axes.of(flat, 0)), description)]

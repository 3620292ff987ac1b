"""Equivalence classes of pipeline ranks: ranks of one class do the same work, so predicting one is enough."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..config import MegatronConfig
from ..models.fingerprint import Part, describe_model
from ..pipeline_parallel.layers_per_stage import make_stages
from .model_class import layers_in_order, model_on_meta

# Fingerprint parts omit sizes, which may differ between layers of a model; hence the shapes.
_Layer = tuple[tuple[Part | None, tuple[torch.Size, ...]], ...]
# For each stage of a rank: whether it is the first, whether it is the last, and its layers.
_Held = tuple[tuple[bool, bool, tuple[_Layer, ...]], ...]


def group_ranks(config: PreTrainedConfig, layout: MegatronConfig) -> list[list[int]]:
    """Groups the pipeline ranks of a layout by the stages that they hold; groups are ordered by their first rank.

    The first rank of a stage represents all of its ranks: if a dim does not divide evenly, the first ranks have larger
    shards.
    """
    if layout.pp_size == 1:
        return [[0]]
    model = model_on_meta(config)
    described, names = describe_model(model).layers({}), layers_in_order(model)
    row = [tuple((described.get(part), _shapes(model.get_submodule(part))) for part in parts) for parts in names]
    stages = make_stages(model, [_in_one(model, parts) for parts in names], layout)
    last = len(stages.rank_of) - 1
    kinds: dict[_Held, list[int]] = {}
    for rank in range(layout.pp_size):
        held = tuple(
            (stage == 0, stage == last, tuple(row[slice(*stages.ranges[stage])])) for stage in stages.of_rank(rank)
        )
        kinds.setdefault(held, []).append(rank)
    return list(kinds.values())


def _shapes(module: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(parameter.shape for parameter in module.parameters())


def _in_one(model: Any, parts: tuple[str, ...]) -> nn.Module:
    modules = [model.get_submodule(name) for name in parts]
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def world_rank(layout: MegatronConfig, pipeline_rank: int) -> int:
    """Returns the first global rank at a pipeline rank."""
    return pipeline_rank * layout.tp_size * layout.cp_size

"""Which ranks of a job do the same on other data, so that one of each kind tells all of them."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..config import MegatronConfig
from ..pipeline_parallel.stage_counts import make_stages
from ..registry.features import Part, describe_model

# Parts leave sizes out, which layers of one model may differ in.
_Layer = tuple[Part, tuple[torch.Size, ...]]
# First and last stage or not, and the layers, of each stage of a rank.
_Held = tuple[tuple[bool, bool, tuple[_Layer, ...]], ...]


def kinds_of_ranks(config: PreTrainedConfig, layout: MegatronConfig) -> list[list[int]]:
    """Groups the pipeline ranks of a layout by the stages that they hold, the kinds in the order of their first rank.

    Ranks of one stage are alike: of what does not divide the first ones have more.
    """
    if layout.pp_size == 1:
        return [[0]]
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    layers = describe_model(model).layers({})
    if len({name.rpartition(".")[0] for name in layers}) > 1:
        # What is cut is not each list by itself: every rank is run.
        return [[rank] for rank in range(layout.pp_size)]
    row = [
        (part, tuple(parameter.shape for parameter in model.get_submodule(name).parameters()))
        for name, part in layers.items()
    ]
    stages = make_stages(model, [model.get_submodule(name) for name in layers], layout)
    last = len(stages.rank_of) - 1
    kinds: dict[_Held, list[int]] = {}
    for rank in range(layout.pp_size):
        held = tuple(
            (stage == 0, stage == last, tuple(row[slice(*stages.ranges[stage])])) for stage in stages.of_rank(rank)
        )
        kinds.setdefault(held, []).append(rank)
    return list(kinds.values())


def world_rank(layout: MegatronConfig, pipeline_rank: int) -> int:
    """Returns the first rank of a job that is this one of a pipeline."""
    return pipeline_rank * layout.tp_size * layout.cp_size

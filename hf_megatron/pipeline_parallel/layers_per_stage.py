"""How many layers of a model each stage of its schedule gets."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..config import MegatronConfig
from ..errors import ConfigError
from ..models.layer_cost import estimate_cost, estimate_costs
from .partition import Stages, check_partition, even, partition
from .pre_post_process import find_modality_encoders
from .schedules import assign_stage_ranks, check_schedule, schedule


def stages_per_rank(config: MegatronConfig) -> int:
    """Returns the stages on each rank: the config's, or by default the schedule's."""
    number = schedule(config.pipeline_schedule).resolve(config.virtual_stages)
    check_schedule(config.pipeline_schedule, config.pp_size, number, config.num_microbatches)
    return number


def make_stages(model: Any, layers: Sequence[nn.Module], config: MegatronConfig) -> Stages:
    """Shares the layers out over the stages of the schedule."""
    per_rank = stages_per_rank(config)
    count = config.pp_size * per_rank
    if isinstance(config.pipeline_partition, tuple):
        counts = config.pipeline_partition
    elif config.pipeline_partition == "layers":
        counts = even(len(layers), count)
    else:
        counts = share_out(model, estimate_costs(layers, model.config.get_text_config()), count)
    check_partition(counts, len(layers), count)
    return Stages.of(counts, assign_stage_ranks(config.pipeline_schedule, config.pp_size, per_rank))


def share_out(model: Any, costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage by what they and the model's ends cost; raises `ConfigError` for too many.

    Args:
        model: its head, and its towers of images; its layers may be fewer.
        costs: of each layer.
    """
    head = model.get_output_embeddings()
    after = 0.0 if head is None else estimate_cost(head, model.config.get_text_config())
    # As if of patches of images there were as many as tokens.
    before = sum(estimate_cost(model.get_submodule(encoder)) for encoder in find_modality_encoders(model))
    counts = partition(costs, stages, before=before, after=after)
    least = layers_with_features(model.config) + 1
    if counts[0] < least <= len(costs) - stages + 1 and stages > 1:
        counts = (least, *partition(costs[least:], stages - 1, after=after))
    return counts


def layers_with_features(config: Any) -> int:
    """Counts the layers behind which features of images are added, with those in between."""
    values = config.to_dict()
    deepstack = len((values.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    # Or the layers that they are added before.
    before = [layer for _, layer in values.get("deepstack_layer_map") or ()]
    return max([deepstack, *before, *(values.get("spatial_target_layers") or () if before else ())])


def require_features_on_first_stage(model: Any, stages: Stages) -> None:
    """Raises `ConfigError` where features of images are added behind layers of later stages, which have none.

    What a loop adds between the last layer of a stage and the first of the next one is lost too.
    """
    count, first = layers_with_features(model.config), stages.ranges[0][1]
    if 0 < count >= first:
        raise ConfigError(
            f"The first pipeline stage has {first} layers: {type(model).__name__} adds features of images behind each "
            f"of the first {count}. Set pipeline_partition to numbers of layers that begin with {count + 1} or more."
        )

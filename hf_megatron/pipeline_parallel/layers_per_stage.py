"""Assignment of a model's layers to pipeline stages."""

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
    """Returns the number of stages per rank: `virtual_stages`, or by default the schedule's."""
    per_rank = schedule(config.pipeline_schedule).resolve(config.virtual_stages)
    check_schedule(config.pipeline_schedule, config.pp_size, per_rank, config.num_microbatches)
    return per_rank


def make_stages(model: Any, layers: Sequence[nn.Module], config: MegatronConfig) -> Stages:
    """Assigns the layers to the stages of the schedule, by the config's partition or by their estimated costs."""
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
    """Returns the number of layers of each stage, balanced by the costs of layers, head and modality encoders.

    Args:
        model: provides head, modality encoders and config; may have fewer layers than `costs`.
        costs: cost of each layer.

    Raises:
        ConfigError: if there are more stages than layers.
    """
    head = model.get_output_embeddings()
    after = 0.0 if head is None else estimate_cost(head, model.config.get_text_config())
    # Assumes as many image patches as text tokens.
    before = sum(estimate_cost(model.get_submodule(encoder)) for encoder in find_modality_encoders(model))
    counts = partition(costs, stages, before=before, after=after)
    # The first stage must have all layers that image features are added to, if that leaves one for each other stage.
    least = layers_with_features(model.config) + 1
    if counts[0] < least <= len(costs) - stages + 1 and stages > 1:
        counts = (least, *partition(costs[least:], stages - 1, after=after))
    return counts


def layers_with_features(config: Any) -> int:
    """Returns the number of first layers that contain all places where image features are added (DeepStack)."""
    values = config.to_dict()
    trailing = len((values.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    # Some configs list the layers before which features are added instead.
    before = [layer for _, layer in values.get("deepstack_layer_map") or ()]
    return max([trailing, *before, *(values.get("spatial_target_layers") or () if before else ())])


def require_features_on_first_stage(model: Any, stages: Stages) -> None:
    """Raises `ConfigError` if image features are added after layers of later stages, which have no features.

    An addition between the last layer of the first stage and the next layer would be lost too.
    """
    count, first = layers_with_features(model.config), stages.ranges[0][1]
    if 0 < count >= first:
        raise ConfigError(
            f"The first pipeline stage has {first} layers, but {type(model).__name__} adds image features after each "
            f"of the first {count}. Set pipeline_partition so that the first stage has {count + 1} layers or more."
        )

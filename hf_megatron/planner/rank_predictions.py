"""Predictions for every kind of rank of a job of any size: memory, time of the peak, collectives, and host reads."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from ..config import MegatronConfig, validate_world_size
from ..diagnostics.allocation_tracker import FORWARD, MOMENTS
from ..diagnostics.step_stats import HostRead, StepFigures
from ..pipeline_parallel.layers_per_stage import stages_per_rank
from ..pipeline_parallel.schedules import Action, rank_actions, register_schedule, schedule, valid_microbatches
from .action_memory import Peak, StepOfActions, measured_actions, microbatches_to_measure, one_at_a_time
from .fake_world import FakeWorld, run_fake_ranks
from .predicted_step import StepSizes, require_possible, step_figures
from .rank_classes import group_ranks, world_rank


@dataclass(frozen=True)
class PredictedRank:
    """A pipeline rank, in bytes; all ranks of its stage do the same.

    Attributes:
        pipeline_rank, kind (`int`): ranks of one kind hold the same layers.
        parameters: number of local parameter entries after tensor and pipeline parallelism.
        kept: category -> bytes between steps.
        peak: peak of a step and its action; without an action if the step was not split into actions.
        collectives: (group, operation) -> calls in a step, and bytes of their largest tensors.
        reads: points where the host waits for the device.
    """

    pipeline_rank: int
    kind: int
    parameters: int
    kept: dict[str, int]
    peak: Peak
    collectives: dict[tuple[str, str], tuple[int, int]]
    reads: tuple[HostRead, ...]


def predict_ranks(
    config: PreTrainedConfig,
    layout: MegatronConfig,
    world_size: int,
    *,
    microbatch_size: int = 1,
    sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
    inputs: Sequence[str] = (),
    target_length: int | None = None,
    as_gloo: bool = False,
    timeout: float = 600.0,
) -> list[PredictedRank]:
    """Predicts a training step with AdamW on every pipeline rank of a job, without memory or other ranks.

    One rank of each kind runs three microbatches (four if backward is split); the schedule's full order is then
    replayed with the memory measured for each action.

    Args:
        config: of the model, which `auto_class` resolves to a class; nothing else is read.
        layout (`MegatronConfig`): need not be verified; without `num_microbatches` the pipeline's default is used.
        world_size (`int`): ranks of the job.
        microbatch_size, sequence_length (`int`): of one dp rank.
        dtype (`torch.dtype`, defaults to bf16): of the weights.
        inputs: model inputs in addition to tokens and labels, of `attention_mask` and `position_ids`.
        target_length (`int`, *optional*): tokens of a label sequence, which the decoder of an encoder-decoder reads; by
            default `sequence_length`.
        as_gloo (`bool`, defaults to `False`): predicts CPU ranks instead of accelerators.
        timeout (`float`): seconds.

    Returns:
        `list`: one entry for each pipeline rank, in order.

    Raises:
        ConfigError: a value is out of its range.
        RankError: the layout does not fit the model, with the rank's own error.
    """
    layout = replace(layout, dp_size=validate_world_size(layout, world_size))
    sizes = StepSizes(microbatch_size, sequence_length, dtype, tuple(inputs), target_length)
    require_possible(config, layout, [0], world_size, sizes)
    played, to_measure = _actions(layout), microbatches_to_measure(schedule(layout.pipeline_schedule))
    measured, is_played = layout, False
    if layout.pp_size > 1:
        count = 1 + max(action.microbatch for action in played[0])
        is_played = count > to_measure
        # With few microbatches, each rank runs the schedule itself and nothing is replayed.
        count = min(count, to_measure)
        measured = replace(layout, num_microbatches=count)
        sizes = replace(sizes, batch_size=count * microbatch_size)
    kinds = group_ranks(config, layout) if is_played else [[rank] for rank in range(layout.pp_size)]

    def on_rank(world: FakeWorld) -> tuple[StepFigures, StepOfActions]:
        step = StepOfActions()
        if is_played:
            # The fork's schedule is replaced, so the original need not be restored.
            register_schedule(one_at_a_time(schedule(layout.pipeline_schedule)), replace=True)
            watching = functools.partial(measured_actions, step)
            return step_figures(world, config, measured, sizes, watching=watching), step
        return step_figures(world, config, measured, sizes), step

    first = [world_rank(layout, ranks[0]) for ranks in kinds]
    results = run_fake_ranks(on_rank, first, world_size, as_gloo=as_gloo, timeout=timeout)
    predicted = []
    for kind, (ranks, (figures, step)) in enumerate(zip(kinds, results, strict=True)):
        for rank in ranks:
            actions = played[rank] if is_played else None
            predicted.append(_predicted(rank, kind, figures, step, actions))
    return sorted(predicted, key=lambda rank: rank.pipeline_rank)


def _actions(layout: MegatronConfig) -> Sequence[Sequence[Action]]:
    """Returns the actions of each pipeline rank in a step; empty without a pipeline, whose step is run directly."""
    if layout.pp_size == 1:
        return [()]
    sizes = layout.pipeline_schedule, layout.pp_size, stages_per_rank(layout)
    count = layout.num_microbatches or valid_microbatches(*sizes, 2 * layout.pp_size)
    return rank_actions(*sizes, count)


def _predicted(
    rank: int, kind: int, figures: StepFigures, step: StepOfActions, actions: Sequence[Action] | None
) -> PredictedRank:
    """Returns the prediction for a rank, from its replayed actions or from the step that was run."""
    # The batch exists when a step begins, but is not kept between steps.
    kept = {category: size for category, size in figures.kept.items() if category not in MOMENTS}
    peak, collectives = Peak(figures.peak, None), dict(figures.collectives)
    if actions is not None:
        moved_step = step.moved_to(sorted({action.stage for action in actions}))
        rows = 1 + max(action.microbatch for action in actions)
        moved_step.before += round(figures.kept.get(FORWARD, 0) * (rows / step.microbatches - 1))
        peak, collectives = moved_step.compute_peak(actions), moved_step.sum_collectives(actions)
    return PredictedRank(rank, kind, figures.parameters, kept, peak, collectives, tuple(figures.reads))

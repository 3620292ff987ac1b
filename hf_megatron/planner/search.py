"""Layout search: estimates all layouts of a job, and simulates the schedules of the fastest."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from transformers import PreTrainedConfig

from ..config import MegatronConfig
from ..core.fork_harness import first_reason
from ..errors import ConfigError, RankError
from .candidates import Bounds, Candidate, Candidates
from .estimate import Estimate, Estimator
from .job import Job
from .predicted_step import require_lengths
from .rank_memory import RankMemory
from .truncated_model import shorten, what_was_not_compared
from .unit_cost_cache import UnitCostCache

# Layouts whose estimates differ by less than this share count as equal.
NOISE = 0.05
_SIMULATED, _SHOWN = 20, 3
# Selective recomputation that keeps more than this share of activations is not tried: flash attention stores no scores.
_SELECTIVE, _FREED = "selective", 0.95


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        job: the training job.
        best: fastest layouts that fit, each with other axis sizes, fastest first.
        nearest (*optional*): the smallest layout that does not fit but, unless `best` is empty, is faster than the best
            one.
        fits, considered (`int`): number of layouts that fit, and of all layouts.
        reasons: reason for an exclusion -> number of times.
        uncompared: for each of `best`, parts without a recorded parity result, which loading compares first.
    """

    job: Job
    best: tuple[Estimate, ...]
    nearest: Estimate | None
    fits: int
    considered: int
    reasons: dict[str, int] = field(default_factory=dict)
    uncompared: tuple[tuple[str, ...], ...] = ()


def search_layouts(config: PreTrainedConfig, job: Job, bounds: Bounds | None = None) -> SearchResult:
    """Searches the layouts of a model.

    Args:
        config: the model's config, which `auto_class` resolves to a class; nothing else is read.
        job: training job.
        bounds (`Bounds`, *optional*): the layouts to search.

    Raises:
        ConfigError: no model can be made of the config, or no layout is left.
    """
    bounds = bounds or Bounds()
    require_lengths(config, job.sequence_length, job.target_length)
    cost_cache = UnitCostCache(shorten(config, job.training, job.dtype), job)
    candidates = Candidates(cost_cache, bounds)
    candidates.require_possible()
    estimator = Estimator(cost_cache)
    meshes = [*candidates.meshes()]
    if not meshes:
        raise ConfigError(
            f"No layout of {job.devices} devices is possible: "
            f"{'; '.join(candidates.reasons) or 'nothing divides them'}."
        )
    tensor_sizes = {mesh.tp_size for mesh in meshes}
    context_sizes = {1, 2} if any(mesh.cp_size > 1 for mesh in meshes) else {1}
    dispatches = any(mesh.ep_size > 1 for mesh in meshes)
    _measure(candidates, tensor_sizes, context_sizes, dispatches=dispatches)
    quick = [*_estimate_quickly(estimator.memory, candidates, meshes)]
    fitting = [candidate for candidate in quick if candidate.peak <= job.memory]
    fastest = _fastest_per_mesh(
        heapq.nsmallest(_SIMULATED, fitting, key=lambda candidate: candidate.order(estimator)), estimator
    )
    limit = fastest[0].seconds * (1 - NOISE) if fastest else math.inf
    too_large = sorted(
        (candidate for candidate in quick if candidate.peak > job.memory), key=lambda candidate: candidate.peak
    )
    # Lazily: most of these never need a time estimate.
    nearest = next((candidate for candidate in too_large if candidate.seconds(estimator) < limit), None)
    return SearchResult(
        job,
        tuple(fastest[:_SHOWN]),
        None if nearest is None else nearest.estimated(estimator),
        len(fitting),
        len(quick),
        candidates.reasons,
        tuple(tuple(what_was_not_compared(cost_cache.short, estimate.layout)) for estimate in fastest[:_SHOWN]),
    )


def _measure(candidates: Candidates, tensor_sizes: set[int], context_sizes: set[int], *, dispatches: bool) -> None:
    """Measures the model's units; drops selective recomputation if the model rejects it or it frees almost nothing."""
    cost_cache, bounds, reason = candidates.cost_cache, candidates.bounds, ""
    tries = [_SELECTIVE] if _SELECTIVE in bounds.recomputes else []
    try:
        cost_cache.measure(tensor_sizes, context_sizes, {None}, dispatches=dispatches, on_smallest=tries)
    except RankError as error:
        if not tries:
            raise
        reason = first_reason(str(error))
        cost_cache.measure(tensor_sizes, context_sizes, {None}, dispatches=dispatches)
    if not tries:
        return
    if not reason:
        plain, selective = (MegatronConfig(tp_size=min(tensor_sizes), recompute=mode) for mode in (None, _SELECTIVE))
        kept = [sum(layer.forward_growth for layer in cost_cache.costs(layout).layers) for layout in (plain, selective)]
        reason = f"frees {1 - kept[1] / kept[0]:.1%} of the layers' activations" if kept[1] > _FREED * kept[0] else ""
    if reason and len(bounds.recomputes) > 1:
        others = tuple(mode for mode in bounds.recomputes if mode != _SELECTIVE)
        candidates.bounds = replace(bounds, recomputes=others)
        candidates.leave_out(f"recompute {_SELECTIVE}: {reason}")
    else:
        cost_cache.measure(tensor_sizes, {1}, {_SELECTIVE})


@dataclass(frozen=True)
class _QuickEstimate:
    """A candidate, and the peak bytes of its fullest rank."""

    candidate: Candidate
    peak: float

    def seconds(self, estimator: Estimator) -> float:
        """Returns its seconds by the closed-form bubble of its schedule."""
        return estimator.quick_seconds(self.candidate.layout, self.candidate.rows, self.candidate.microbatches)

    def order(self, estimator: Estimator) -> tuple[float, float]:
        return self.seconds(estimator), self.peak

    def estimated(self, estimator: Estimator) -> Estimate:
        layout, microbatches = self.candidate.layout, self.candidate.microbatches
        if layout.pp_size > 1:
            layout = replace(layout, num_microbatches=microbatches)
        return estimator.estimate(layout, self.candidate.rows, microbatches)


def _estimate_quickly(
    ranks: RankMemory, candidates: Candidates, meshes: Iterable[MegatronConfig]
) -> Iterator[_QuickEstimate]:
    bounds, memory = candidates.bounds, candidates.job.memory
    stages = candidates.zero_stages()
    for mesh in meshes:
        for stage in stages:
            # Recomputation is slower: skip it for sizes that fit without it.
            fits: set[tuple] = set()
            for recompute in bounds.recomputes:
                # Larger microbatches need more memory: once one does not fit, skip the larger ones of the schedule.
                too_large: set[tuple] = set()
                for candidate in candidates.steps(replace(mesh, zero_stage=stage, recompute=recompute)):
                    layout, sizes = candidate.layout, (candidate.rows, candidate.microbatches)
                    schedule = layout.pipeline_schedule, layout.virtual_stages
                    if schedule in too_large or (*schedule, candidate.rows) in fits:
                        continue
                    peak = ranks.peak(layout, *sizes)
                    if peak <= memory:
                        fits.add((*schedule, candidate.rows))
                    else:
                        too_large.add(schedule)
                    yield _QuickEstimate(candidate, peak)


def _fastest_per_mesh(quick_estimates: Iterable[_QuickEstimate], estimator: Estimator) -> list[Estimate]:
    """Estimates layouts by simulation, and returns the fastest for each combination of axis sizes."""
    best: dict[tuple, Estimate] = {}
    for estimate in sorted(
        (quick.estimated(estimator) for quick in quick_estimates),
        key=lambda estimate: (estimate.seconds, estimate.peak),
    ):
        layout = estimate.layout
        best.setdefault((layout.tp_size, layout.cp_size, layout.pp_size, layout.ep_size), estimate)
    return [*best.values()]

"""Memory of every pipeline rank of a layout, from the memory of its units and the schedule's order."""

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MegatronConfig
from ..pipeline_parallel.layers_per_stage import stages_per_rank
from ..pipeline_parallel.schedule_simulator import most_held
from ..pipeline_parallel.schedules import assign_stage_ranks, computations, schedule, valid_microbatches
from .unit_cost_cache import KeptUnit, UnitCostCache
from .unit_costs import Runs
from .unit_tracker import UnitFigures

ACTIVATIONS, AT_WORK, GATHERED, DECODED = "activations", "at work", "gathered weights", "decoded weights"
_GRADIENT, _IN_FLIGHT = 4, 2
# Minimum entries of a gradient bucket, as in `default_capacity`.
_BUCKET = 40_000_000


@dataclass(frozen=True)
class RankTable:
    """Memory that does not depend on the microbatch size and the number of microbatches.

    Attributes:
        rank_of: rank of each stage.
        static: for each pipeline rank, category -> bytes without activations.
        sums: for each rank, the sum of these.
        kept: for each stage, activation bytes that a sample keeps until its backward.
        peaks: for each rank, bytes in addition to kept activations while one sample is processed.
        entries, trained, owned: for each rank, entries of its weights, of those with gradients, and of its optimizer's
            shard.
    """

    rank_of: tuple[int, ...]
    static: tuple[Counter[str], ...]
    sums: tuple[int, ...]
    kept: tuple[int, ...]
    peaks: tuple[int, ...]
    entries: tuple[int, ...]
    trained: tuple[int, ...]
    owned: tuple[float, ...]


class RankMemory:
    """Sums the memory of ranks.

    Args:
        cost_cache: costs of the model's units.
    """

    def __init__(self, cost_cache: UnitCostCache):
        self.cost_cache = cost_cache
        self._tables: dict[tuple, RankTable] = {}
        self._stages: dict[tuple, tuple[int, int]] = {}
        self._kept: dict[tuple, KeptUnit] = {}
        self._per_rank: dict[tuple[str, int | None, int], int] = {}

    def per_rank(self, layout: MegatronConfig) -> int:
        """Returns `stages_per_rank`, cached, since a search requests it many times for few layouts."""
        key = layout.pipeline_schedule, layout.virtual_stages, layout.pp_size
        if key not in self._per_rank:
            self._per_rank[key] = stages_per_rank(layout)
        return self._per_rank[key]

    def table(self, layout: MegatronConfig) -> RankTable:
        """Returns the table of a layout, cached for all microbatch sizes and numbers of microbatches."""
        per_rank = self.per_rank(layout)
        shape = schedule(layout.pipeline_schedule).v_shaped, per_rank
        sizes = layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size, layout.ep_size, layout.etp_size
        key = *sizes, *shape, layout.zero_stage, layout.recompute, layout.offload_optimizer
        if key not in self._tables:
            self._tables[key] = self._make(layout, per_rank)
        return self._tables[key]

    def held(self, layout: MegatronConfig, microbatches: int) -> tuple[float, ...]:
        """Returns the peak activation bytes of each rank with one sample per microbatch."""
        sizes = layout.pp_size, self.per_rank(layout), microbatches
        return _held(layout.pipeline_schedule, *sizes, self.table(layout).kept)

    def peak(self, layout: MegatronConfig, rows: int, microbatches: int) -> float:
        """Returns the peak bytes of the fullest rank; assumes that all categories peak at the same time."""
        table, local_rows = self.table(layout), rows / layout.cp_size
        held = self.held(layout, microbatches)
        return max(
            static_bytes + local_rows * (kept + peak)
            for static_bytes, kept, peak in zip(table.sums, held, table.peaks, strict=True)
        )

    def categories(self, layout: MegatronConfig, rows: int, microbatches: int) -> tuple[Counter[str], ...]:
        """Returns category -> bytes of each pipeline rank at its peak."""
        table, local_rows = self.table(layout), rows / layout.cp_size
        totals = []
        ranks = zip(table.static, self.held(layout, microbatches), table.peaks, strict=True)
        for static, held, peak in ranks:
            total = static + Counter({ACTIVATIONS: round(local_rows * held), AT_WORK: round(local_rows * peak)})
            totals.append(total)
        return tuple(totals)

    def _make(self, layout: MegatronConfig, per_rank: int) -> RankTable:
        rank_of = tuple(assign_stage_ranks(layout.pipeline_schedule, layout.pp_size, per_rank))
        stages, of_ranks = self.cost_cache.runs(len(rank_of)), self.cost_cache.get_rank_runs(rank_of)
        # Most ranks between the first and the last hold the same units: compute each kind once.
        kinds = {held: number for number, held in enumerate(dict.fromkeys(of_ranks))}
        kept_by = [self._kept_rank(layout, held) for held in kinds]
        static_by = [self._static(layout, entry) for entry in kept_by]
        peak_by = [max(0, *(self._stage(layout, runs)[1] for runs, _ in held)) for held in kinds]
        kind_indices = [kinds[held] for held in of_ranks]
        kept = [kept_by[number] for number in kind_indices]
        static = tuple(static_by[number] for number in kind_indices)
        if len(stages) == 1:
            static[0].subtract(self.cost_cache.kept(layout)[1].kept)
        return RankTable(
            rank_of,
            static,
            tuple(sum(entry.values()) for entry in static),
            tuple(self._stage(layout, runs)[0] for runs in stages),
            tuple(peak_by[number] for number in kind_indices),
            tuple(unit.entries for unit in kept),
            tuple(unit.trained for unit in kept),
            tuple(unit.owned for unit in kept),
        )

    def _stage(self, layout: MegatronConfig, runs: Runs) -> tuple[int, int]:
        """Returns the bytes that a microbatch's forward keeps on a stage, and the peak above that."""
        key = layout.tp_size, layout.ep_size > 1, layout.recompute, runs
        if key not in self._stages:
            costs = self.cost_cache.costs(layout)
            units = [(costs.unit(number), count) for number, count in runs]
            growth = sum(unit.forward_growth * count for unit, count in units)
            self._stages[key] = growth, _peak(units) - growth
        return self._stages[key]

    def _kept_rank(self, layout: MegatronConfig, held: tuple[tuple[Runs, int], ...]) -> KeptUnit:
        sizes = layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size, layout.ep_size, layout.etp_size
        key = *sizes, layout.zero_stage, layout.offload_optimizer, held
        if key not in self._kept:
            units, _ = self.cost_cache.kept(layout)
            counts: Counter[int] = Counter()
            for runs, stages in held:
                for unit, count in runs:
                    counts[unit] += count * stages
            self._kept[key] = functools.reduce(operator.add, (units[unit].repeated(n) for unit, n in counts.items()))
        return self._kept[key]

    def _static(self, layout: MegatronConfig, kept: KeptUnit) -> Counter[str]:
        sizes = Counter(kept.kept)
        if layout.zero_stage >= 2:
            sizes["gradients"] += kept.gradients
        if layout.zero_stage == 2:
            # One bucket is being filled while another is in flight.
            ranks = (layout.dp_size or 1) * layout.cp_size
            sizes["gradients"] += _GRADIENT * min(kept.trained, _IN_FLIGHT * max(_BUCKET, ranks * 1_000_000))
        if layout.zero_stage == 3:
            sizes[GATHERED] += sum(kept.largest)
        if kept.decoded:
            sizes[DECODED] += kept.decoded
        return sizes


def _peak(units: Sequence[tuple[UnitFigures, int]]) -> int:
    """Returns the peak bytes of a microbatch's forward and backward through units, relative to its start."""
    total = most = 0
    for unit, count in units:
        most = max(most, total + max(0, (count - 1) * unit.forward_growth) + unit.forward_peak)
        total += count * unit.forward_growth
    for unit, count in reversed(units):
        most = max(most, total + max(0, (count - 1) * unit.backward_growth) + unit.backward_peak)
        total += count * unit.backward_growth
    return most


@functools.lru_cache
def _is_growing(name: str, ranks: int, per_rank: int) -> bool:
    """Returns whether ranks keep more microbatches the more there are, beyond a full pipeline."""
    sizes = dict.fromkeys(range(ranks * per_rank), 1)
    full = valid_microbatches(name, ranks, per_rank, 2 * ranks * per_rank)
    fuller = valid_microbatches(name, ranks, per_rank, 4 * ranks * per_rank)
    held = [[most_held(order, sizes) for order in computations(name, ranks, per_rank, n)] for n in (full, fuller)]
    return held[0] != held[1]


@functools.lru_cache(maxsize=4096)
def _held(name: str, ranks: int, per_rank: int, microbatches: int, kept: tuple[int, ...]) -> tuple[float, ...]:
    if ranks == 1:
        return (float(kept[0]),)
    # Beyond a full pipeline the number of in-flight microbatches stops growing, unless all forwards come first.
    most = 2 * ranks * per_rank + microbatches % ranks
    if most < microbatches and schedule(name).runs(ranks, per_rank, most) and not _is_growing(name, ranks, per_rank):
        return _held(name, ranks, per_rank, most, kept)
    sizes = dict(enumerate(kept))
    return tuple(most_held(order, sizes) for order in computations(name, ranks, per_rank, microbatches))

"""Bytes of every pipeline rank of a layout, from what its units keep and the schedule's own order."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MegatronConfig
from ..pipeline_parallel.partition import Stages
from ..pipeline_parallel.schedules import computations, rank_of_stage, schedule
from ..pipeline_parallel.simulation import most_held
from ..pipeline_parallel.stage_counts import stages_per_rank
from .unit_book import KeptUnit, UnitBook
from .unit_ledger import UnitFigures

ACTIVATIONS, AT_WORK, GATHERED = "activations", "at work", "gathered weights"
_ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")
_GRADIENT, _IN_FLIGHT = 4, 2
# Of `default_capacity`: what a bucket of gradients has at least, and a step of AdamW for each number: main weight and
# moments read and written, gradient read, weight written.
_BUCKET = 40_000_000


@dataclass(frozen=True)
class RankTable:
    """What does not change with the rows and the number of microbatches.

    Attributes:
        stages: of the layout.
        static: of each pipeline rank, category -> bytes without activations.
        sums: of each rank, all of these.
        kept: bytes of each stage that one row leaves until its backward.
        peaks: of each rank, bytes above what is kept while one row is at work.
        entries, owned: of each rank, numbers of its weights, and those that its optimizer steps.
    """

    stages: Stages
    static: tuple[Counter[str], ...]
    sums: tuple[int, ...]
    kept: tuple[int, ...]
    peaks: tuple[int, ...]
    entries: tuple[int, ...]
    owned: tuple[float, ...]


class RankMemory:
    """Adds up what ranks hold.

    Args:
        book: of the model's units.
    """

    def __init__(self, book: UnitBook):
        self.book = book
        self._tables: dict[tuple, RankTable] = {}

    def table(self, layout: MegatronConfig) -> RankTable:
        """Returns what is the same for any number of rows and microbatches."""
        per_rank = stages_per_rank(layout)
        shape = schedule(layout.pipeline_schedule).v_shaped, per_rank
        sizes = layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size, layout.ep_size, layout.etp_size
        key = *sizes, *shape, layout.zero_stage, layout.recompute
        if key not in self._tables:
            self._tables[key] = self._make(layout, per_rank)
        return self._tables[key]

    def held(self, layout: MegatronConfig, microbatches: int) -> tuple[float, ...]:
        """Returns the most bytes of activations that each rank holds at a time, with one row in a microbatch."""
        sizes = layout.pp_size, stages_per_rank(layout), microbatches
        return _held(layout.pipeline_schedule, *sizes, self.table(layout).kept)

    def peak(self, layout: MegatronConfig, rows: int, microbatches: int) -> float:
        """Returns the bytes of the fullest rank; the fullest moment is taken for one at which all is there."""
        table, share = self.table(layout), rows / layout.cp_size
        held = self.held(layout, microbatches)
        return max(own + share * (kept + peak) for own, kept, peak in zip(table.sums, held, table.peaks, strict=True))

    def categories(self, layout: MegatronConfig, rows: int, microbatches: int) -> tuple[Counter[str], ...]:
        """Returns category -> bytes of each pipeline rank at its fullest."""
        table, share = self.table(layout), rows / layout.cp_size
        found = []
        ranks = zip(table.static, self.held(layout, microbatches), table.peaks, strict=True)
        for static, held, peak in ranks:
            own = static + Counter({ACTIVATIONS: round(share * held), AT_WORK: round(share * peak)})
            found.append(own)
        return tuple(found)

    def _make(self, layout: MegatronConfig, per_rank: int) -> RankTable:
        counts = self.book.partition(layout.pp_size * per_rank)
        stages = Stages.of(counts, rank_of_stage(layout.pipeline_schedule, layout.pp_size, per_rank))
        units = [self._units(layout, start, stop, stages) for start, stop in stages.ranges]
        kept = tuple(sum(unit.left for unit in found) for found in units)
        peaks = [_peak(found) - own for found, own in zip(units, kept, strict=True)]
        ranks = [self._kept_units(layout, stages, rank) for rank in range(layout.pp_size)]
        static = tuple(self._static(layout, found) for found in ranks)
        if len(stages.ranges) == 1:
            static[0].subtract(self.book.kept(layout)[3].kept)
        return RankTable(
            stages,
            static,
            tuple(sum(found.values()) for found in static),
            kept,
            tuple(max(0, *(peaks[stage] for stage in stages.of_rank(rank))) for rank in range(layout.pp_size)),
            tuple(sum(unit.entries for unit in found) for found in ranks),
            tuple(sum(unit.owned for unit in found) for found in ranks),
        )

    def _units(self, layout: MegatronConfig, start: int, stop: int, stages: Stages) -> list[UnitFigures]:
        costs = self.book.costs(layout)
        units = [costs.layers[layer] for layer in self.book.short.layers[start:stop]]
        if start == 0:
            units.insert(0, costs.before)
        if stop == stages.ranges[-1][1]:
            units.append(costs.after)
        return units

    def _kept_units(self, layout: MegatronConfig, stages: Stages, rank: int) -> list[KeptUnit]:
        before, layers, after, _ = self.book.kept(layout)
        units = []
        for stage in stages.of_rank(rank):
            start, stop = stages.ranges[stage]
            units += [before] if stage == 0 else []
            units += [layers[layer] for layer in self.book.short.layers[start:stop]]
            units += [after] if stage == len(stages.ranges) - 1 else []
        return units

    def _static(self, layout: MegatronConfig, units: Sequence[KeptUnit]) -> Counter[str]:
        found: Counter[str] = Counter()
        for unit in units:
            found.update(unit.kept)
        if layout.zero_stage >= 2:
            found["gradients"] += sum(unit.gradients for unit in units)
        if layout.zero_stage == 2:
            # A bucket that fills, and one that travels.
            entries, ranks = sum(unit.entries for unit in units), (layout.dp_size or 1) * layout.cp_size
            found["gradients"] += _GRADIENT * min(entries, _IN_FLIGHT * max(_BUCKET, ranks * 1_000_000))
        if layout.zero_stage == 3:
            found[GATHERED] += sum(sorted(unit.weights for unit in units)[-_IN_FLIGHT:])
        return found


def _peak(units: Sequence[UnitFigures]) -> int:
    """Returns the most bytes of a microbatch's forward and backward through units, above what was there before."""
    total = most = 0
    for unit in units:
        most = max(most, total + unit.forward_peak)
        total += unit.left
    for unit in reversed(units):
        most = max(most, total + unit.backward_peak)
        total += unit.backward_left
    return most


@functools.lru_cache(maxsize=4096)
def _held(name: str, ranks: int, per_rank: int, microbatches: int, kept: tuple[int, ...]) -> tuple[float, ...]:
    if ranks == 1:
        return (float(kept[0]),)
    # No more of them are there at a time than a full pipeline has, but where all forwards come first.
    most = 2 * ranks * per_rank + microbatches % ranks
    if name not in _ALL_FORWARDS_FIRST and most < microbatches and schedule(name).runs(ranks, per_rank, most):
        return _held(name, ranks, per_rank, most, kept)
    sizes = dict(enumerate(kept))
    return tuple(most_held(order, sizes) for order in computations(name, ranks, per_rank, microbatches))

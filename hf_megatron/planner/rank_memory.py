"""Bytes of every pipeline rank of a layout, from what its units keep and the schedule's own order."""

import functools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import MegatronConfig
from ..pipeline_parallel.layers_per_stage import stages_per_rank
from ..pipeline_parallel.schedule_simulator import most_held
from ..pipeline_parallel.schedules import computations, rank_of_stage, schedule
from .unit_cost_cache import KeptUnit, UnitBook
from .unit_costs import Runs
from .unit_tracker import UnitFigures

ACTIVATIONS, AT_WORK, GATHERED, DECODED = "activations", "at work", "gathered weights", "decoded weights"
_ALL_FORWARDS_FIRST = ("gpipe", "looped_bfs")
_GRADIENT, _IN_FLIGHT = 4, 2
# Of `default_capacity`: what a bucket of gradients has at least, and a step of AdamW for each number: main weight and
# moments read and written, gradient read, weight written.
_BUCKET = 40_000_000


@dataclass(frozen=True)
class RankTable:
    """What does not change with the rows and the number of microbatches.

    Attributes:
        rank_of: rank of each stage.
        static: of each pipeline rank, category -> bytes without activations.
        sums: of each rank, all of these.
        kept: bytes of each stage that one row leaves until its backward.
        peaks: of each rank, bytes above what is kept while one row is at work.
        entries, trained, owned: of each rank, numbers of its weights, those that have gradients, and those that its
            optimizer steps.
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
    """Adds up what ranks hold.

    Args:
        book: of the model's units.
    """

    def __init__(self, book: UnitBook):
        self.book = book
        self._tables: dict[tuple, RankTable] = {}
        self._stages: dict[tuple, tuple[int, int]] = {}
        self._kept: dict[tuple, KeptUnit] = {}
        self._per_rank: dict[tuple[str, int | None, int], int] = {}

    def per_rank(self, layout: MegatronConfig) -> int:
        """Returns the stages of each rank, as `stages_per_rank`: a search asks for a few layouts' many times."""
        key = layout.pipeline_schedule, layout.virtual_stages, layout.pp_size
        if key not in self._per_rank:
            self._per_rank[key] = stages_per_rank(layout)
        return self._per_rank[key]

    def table(self, layout: MegatronConfig) -> RankTable:
        """Returns what is the same for any number of rows and microbatches."""
        per_rank = self.per_rank(layout)
        shape = schedule(layout.pipeline_schedule).v_shaped, per_rank
        sizes = layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size, layout.ep_size, layout.etp_size
        key = *sizes, *shape, layout.zero_stage, layout.recompute, layout.offload_optimizer
        if key not in self._tables:
            self._tables[key] = self._make(layout, per_rank)
        return self._tables[key]

    def held(self, layout: MegatronConfig, microbatches: int) -> tuple[float, ...]:
        """Returns the most bytes of activations that each rank holds at a time, with one row in a microbatch."""
        sizes = layout.pp_size, self.per_rank(layout), microbatches
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
        rank_of = tuple(rank_of_stage(layout.pipeline_schedule, layout.pp_size, per_rank))
        stages, of_ranks = self.book.runs(len(rank_of)), self.book.runs_of_ranks(rank_of)
        # Ranks between the first and the last hold the same.
        kinds = {held: number for number, held in enumerate(dict.fromkeys(of_ranks))}
        kept_by = [self._kept_rank(layout, held) for held in kinds]
        static_by = [self._static(layout, found) for found in kept_by]
        peak_by = [max(0, *(self._stage(layout, runs)[1] for runs, _ in held)) for held in kinds]
        numbers = [kinds[held] for held in of_ranks]
        kept = [kept_by[number] for number in numbers]
        static = tuple(static_by[number] for number in numbers)
        if len(stages) == 1:
            static[0].subtract(self.book.kept(layout)[1].kept)
        return RankTable(
            rank_of,
            static,
            tuple(sum(found.values()) for found in static),
            tuple(self._stage(layout, runs)[0] for runs in stages),
            tuple(peak_by[number] for number in numbers),
            tuple(unit.entries for unit in kept),
            tuple(unit.trained for unit in kept),
            tuple(unit.owned for unit in kept),
        )

    def _stage(self, layout: MegatronConfig, runs: Runs) -> tuple[int, int]:
        """Returns what a microbatch's forward leaves of a stage, and the most above that while it is at work."""
        key = layout.tp_size, layout.ep_size > 1, layout.recompute, runs
        if key not in self._stages:
            costs = self.book.costs(layout)
            units = [(costs.unit(number), count) for number, count in runs]
            left = sum(unit.left * count for unit, count in units)
            self._stages[key] = left, _peak(units) - left
        return self._stages[key]

    def _kept_rank(self, layout: MegatronConfig, held: tuple[tuple[Runs, int], ...]) -> KeptUnit:
        sizes = layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size, layout.ep_size, layout.etp_size
        key = *sizes, layout.zero_stage, layout.offload_optimizer, held
        if key not in self._kept:
            units, _ = self.book.kept(layout)
            counts: Counter[int] = Counter()
            for runs, stages in held:
                for unit, count in runs:
                    counts[unit] += count * stages
            self._kept[key] = functools.reduce(operator.add, (units[unit].repeated(n) for unit, n in counts.items()))
        return self._kept[key]

    def _static(self, layout: MegatronConfig, kept: KeptUnit) -> Counter[str]:
        found = Counter(kept.kept)
        if layout.zero_stage >= 2:
            found["gradients"] += kept.gradients
        if layout.zero_stage == 2:
            # A bucket that fills, and one that travels.
            ranks = (layout.dp_size or 1) * layout.cp_size
            found["gradients"] += _GRADIENT * min(kept.trained, _IN_FLIGHT * max(_BUCKET, ranks * 1_000_000))
        if layout.zero_stage == 3:
            found[GATHERED] += sum(kept.largest)
        if kept.decoded:
            found[DECODED] += kept.decoded
        return found


def _peak(units: Sequence[tuple[UnitFigures, int]]) -> int:
    """Returns the most bytes of a microbatch's forward and backward through units, above what was there before."""
    total = most = 0
    for unit, count in units:
        most = max(most, total + max(0, (count - 1) * unit.left) + unit.forward_peak)
        total += count * unit.left
    for unit, count in reversed(units):
        most = max(most, total + max(0, (count - 1) * unit.backward_left) + unit.backward_peak)
        total += count * unit.backward_left
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

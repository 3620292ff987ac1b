"""What the units of a model cost on a rank of some layouts, run once each in a fake world."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..axes import Axes
from ..config import MegatronConfig
from .dry_run import StepSizes, step_figures
from .fake_world import FakeWorld, run_fake_places
from .short_model import ShortModel
from .unit_ledger import AFTER, BEFORE, UnitFigures, UnitLedger

# Numbers of units that are no layers.
BEFORE_LAYERS, AFTER_LAYERS = -1, -2

# The units of a stage in their order, and how often each follows itself: numbers of a short model's layers, or these.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitCosts:
    """What the units of a model do with one microbatch on one rank.

    Attributes:
        before, after: around the layers.
        layers: those of the short model.
    """

    before: UnitFigures
    layers: tuple[UnitFigures, ...]
    after: UnitFigures

    def unit(self, number: int) -> UnitFigures:
        """Returns a layer's figures, or those of what is around the layers."""
        return self.before if number == BEFORE_LAYERS else self.after if number == AFTER_LAYERS else self.layers[number]

    def recomputed(self, hidden: int) -> "UnitCosts":
        """Returns the costs with layers that keep their input, of so many bytes, and run again in backward."""
        return replace(self, layers=tuple(_recomputed(layer, hidden) for layer in self.layers))


def measure_units(
    short: ShortModel, layouts: Sequence[MegatronConfig], sizes: StepSizes, *, timeout: float = 600.0
) -> list[UnitCosts]:
    """Runs steps of a short model as rank 0 of each layout, which has no pipeline.

    Args:
        layouts: with their `dp_size`.
        sizes: of one microbatch.

    Raises:
        RankError: a layout does not fit the model; it has the rank's own error.
    """

    def on_rank(world: FakeWorld, number: int) -> UnitCosts:
        layout = layouts[number]
        ranks = {name: axis.size for name, axis in Axes.of(layout, 0).named}
        made: list[UnitLedger] = []

        def ledger_of(model: Any) -> UnitLedger:
            made.append(UnitLedger(model, ranks))
            return made[-1]

        step_figures(world, short.config, layout, sizes, ledger_of=ledger_of)
        return _costs(made[0], short)

    places = [(0, layout.ranks_per_replica * (layout.dp_size or 1)) for layout in layouts]
    return run_fake_places(on_rank, places, timeout=timeout)


def _costs(ledger: UnitLedger, short: ShortModel) -> UnitCosts:
    ledger.end_step()
    none = UnitFigures()
    layers = [
        functools.reduce(_joined, (ledger.units.get(name, none) for name in names), none) for names in short.names
    ]
    return UnitCosts(ledger.units.get(BEFORE, none), tuple(layers), ledger.units.get(AFTER, none))


def _recomputed(layer: UnitFigures, hidden: int) -> UnitFigures:
    return UnitFigures(
        layer.forward,
        layer.forward + layer.backward,
        hidden,
        # What forward holds at once when nothing is kept: no more than half, where backward needs most of it.
        max(hidden, layer.forward_peak // 2),
        -hidden,
        max(layer.forward_peak, layer.left + layer.backward_peak) + hidden,
    )


def _joined(one: UnitFigures, other: UnitFigures) -> UnitFigures:
    """Adds up two parts of a layer, of which one runs after the other."""
    return UnitFigures(
        one.forward + other.forward,
        one.backward + other.backward,
        one.left + other.left,
        max(one.forward_peak, one.left + other.forward_peak),
        one.backward_left + other.backward_left,
        max(other.backward_peak, other.backward_left + one.backward_peak),
    )

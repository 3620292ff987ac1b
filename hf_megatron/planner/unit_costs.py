"""Unit costs: measures the units of a model in a fake world under some layouts."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..compat.torch_dtensor import local_tensor
from ..config import MegatronConfig
from ..core.axes import Axes
from ..core.off_stage import local_named_parameters
from ..data_parallel.memory_model import LocalParameter
from ..parallel_state import parallel_state
from .fake_world import FakeWorld, run_fake_places
from .predicted_step import StepSizes, step_figures
from .training import WHOLE, Training
from .truncated_model import ShortModel
from .unit_tracker import AFTER, BEFORE, UnitFigures, UnitTracker

# Indices of the units outside the layers.
BEFORE_LAYERS, AFTER_LAYERS = -1, -2

# Units of a stage in order, and the number of consecutive repetitions: indices of a short model's layers, or the above.
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitCosts:
    """Costs of a model's units for one microbatch on one rank.

    Attributes:
        before, after: outside the layers.
        layers: for each layer of the short model.
        adapters: for each of these, the local parameters of its adapters.
    """

    before: UnitFigures
    layers: tuple[UnitFigures, ...]
    after: UnitFigures
    adapters: tuple[tuple[LocalParameter, ...], ...]

    def unit(self, number: int) -> UnitFigures:
        """Returns the figures of a layer, or of the units outside the layers."""
        return self.before if number == BEFORE_LAYERS else self.after if number == AFTER_LAYERS else self.layers[number]

    def recomputed(self, hidden: int) -> "UnitCosts":
        """Returns the costs with full recomputation: layers keep only their input of `hidden` bytes."""
        return replace(self, layers=tuple(_recomputed(layer, hidden) for layer in self.layers))


def measure_units(
    short: ShortModel,
    layouts: Sequence[MegatronConfig],
    sizes: StepSizes,
    training: Training = WHOLE,
    *,
    timeout: float = 600.0,
) -> list[UnitCosts]:
    """Runs steps of a short model as rank 0 of each layout, which has no pipeline.

    Args:
        layouts: with their `dp_size`.
        sizes: of one microbatch.
        training (`Training`, *optional*): trained parts of the model, the same that `short` was made for.

    Raises:
        RankError: a layout does not fit the model, with the rank's own error.
    """

    def on_rank(world: FakeWorld, number: int) -> UnitCosts:
        layout = layouts[number]
        ranks = {name: axis.size for name, axis in Axes.of(layout, 0).named}
        trackers: list[tuple[UnitTracker, Any]] = []

        def make_tracker(model: Any) -> UnitTracker:
            trackers.append((UnitTracker(model, ranks), model))
            return trackers[-1][0]

        # With context parallelism only the traffic is used, which one step shows.
        steps = 2 if layout.cp_size == 1 else 1
        step_figures(
            *(world, short.config, layout, sizes),
            adapt=training.adapt,
            optimizes=False,
            steps=steps,
            make_tracker=make_tracker,
        )
        [(tracker, model)] = trackers
        return _costs(tracker, short, _adapters(model, short))

    places = [(0, layout.ranks_per_replica * (layout.dp_size or 1)) for layout in layouts]
    return run_fake_places(on_rank, places, timeout=timeout)


def _adapters(model: Any, short: ShortModel) -> tuple[tuple[LocalParameter, ...], ...]:
    """Returns the local adapter parameters of each layer, by their local shapes; there are none outside the layers."""
    base_names = {name for name, _ in short.model.named_parameters()}
    held: list[list[LocalParameter]] = [[] for _ in short.names]
    units, state = short.unit_by_module, parallel_state(model)
    assert state is not None
    for name, parameter in local_named_parameters(model):
        if parameter.requires_grad and name.replace(".base_layer.", ".") not in base_names:
            unit = next(unit for prefix, unit in units.items() if name.startswith(f"{prefix}."))
            average = state.shardings[name].gradient.average
            size = parameter.dtype.itemsize
            held[unit].append(LocalParameter(tuple(local_tensor(parameter).shape), size, average))
    return tuple(map(tuple, held))


def _costs(tracker: UnitTracker, short: ShortModel, adapters: tuple[tuple[LocalParameter, ...], ...]) -> UnitCosts:
    tracker.end_step()
    none = UnitFigures()
    layers = [
        functools.reduce(_joined, (tracker.units.get(name, none) for name in names), none) for names in short.names
    ]
    return UnitCosts(tracker.units.get(BEFORE, none), tuple(layers), tracker.units.get(AFTER, none), adapters)


def _recomputed(layer: UnitFigures, hidden: int) -> UnitFigures:
    return UnitFigures(
        layer.forward,
        layer.forward + layer.backward,
        hidden,
        # Peak of a forward that saves nothing: taken as half of the measured peak, since most of that is saved for
        # the backward.
        max(hidden, layer.forward_peak // 2),
        -hidden,
        max(layer.forward_peak, layer.forward_growth + layer.backward_peak) + hidden,
    )


def _joined(one: UnitFigures, other: UnitFigures) -> UnitFigures:
    """Combines two consecutive parts of a layer."""
    return UnitFigures(
        one.forward + other.forward,
        one.backward + other.backward,
        one.forward_growth + other.forward_growth,
        max(one.forward_peak, one.forward_growth + other.forward_peak),
        one.backward_growth + other.backward_growth,
        max(other.backward_peak, other.backward_growth + one.backward_peak),
    )

"""What a rank holds of each unit's parameters on a layout: from the claims that the layout itself is planned by."""

import copy
from dataclasses import dataclass

from ..config import MegatronConfig
from ..core.axes import Axes
from ..data_parallel.memory_model import LocalParameter
from ..parallelize import plan
from ..pipeline_parallel.pre_post_process import find_modality_encoders
from .training import WHOLE, Training
from .truncated_model import ShortModel


@dataclass(frozen=True)
class UnitParameters:
    """What a rank holds of a short model.

    Attributes:
        before, after: around the layers; what is tied is in both.
        layers: those of the short model.
        tied: what `after` repeats of `before`.
        experts: layers of which experts are split over ranks of their own.
        buffers (`int`): bytes of tables, as of rotary positions.
    """

    before: tuple[LocalParameter, ...]
    layers: tuple[tuple[LocalParameter, ...], ...]
    after: tuple[LocalParameter, ...]
    tied: tuple[LocalParameter, ...]
    experts: frozenset[int]
    buffers: int


def parameters_of_units(
    short: ShortModel, layout: MegatronConfig, itemsize: int, training: Training = WHOLE
) -> UnitParameters:
    """Plans a short model on a layout without its pipeline, and returns what the first rank holds.

    Args:
        layout: with its `dp_size`, and one stage.
        itemsize (`int`): bytes of a weight's entry.
        training (`Training`, *optional*): what of the model is trained; its adapters are not counted here.

    Raises:
        MegatronError: the layout does not fit the model; it says why.
    """
    axes = Axes.of(layout, 0)
    model = copy.deepcopy(short.model)
    state = plan(model, layout, axes)
    units = short.unit_of_module
    # Some are defined behind the layers of the text model that they come before.
    modality_encoders = tuple(f"{encoder}." for encoder in find_modality_encoders(short.model))
    before: list[LocalParameter] = []
    after: list[LocalParameter] = []
    tied: list[LocalParameter] = []
    layers: list[list[LocalParameter]] = [[] for _ in short.names]
    experts, seen = set(), set()
    quantized = {*training.quantized_weights(short.model)}
    for name, parameter in short.model.named_parameters(remove_duplicate=False):
        sharding = state.shardings[name]
        shape = state.placement(name).local_shape(sharding.shape, axes)
        codes = training.code_bytes(*shape) if name in quantized else None
        held = LocalParameter(shape, itemsize, sharding.gradient.average, parameter.requires_grad, codes)
        unit = next((units[prefix] for prefix in _prefixes(name) if prefix in units), None)
        if unit is None:
            is_tied = id(parameter) in seen
            is_before = not any(layers) or name.startswith(modality_encoders)
            (after if is_tied or not is_before else before).append(held)
            if is_tied:
                tied.append(held)
        elif id(parameter) not in seen:
            layers[unit].append(held)
            if any(split.axis in ("ep", "etp") for split in sharding.placement.splits):
                experts.add(unit)
        seen.add(id(parameter))
    buffers = sum(buffer.nbytes for buffer in short.model.buffers())
    return UnitParameters(
        tuple(before), tuple(map(tuple, layers)), tuple(after), tuple(tied), frozenset(experts), buffers
    )


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]

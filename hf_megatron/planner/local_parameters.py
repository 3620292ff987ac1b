"""Local parameters of each unit under a layout, derived from the same shardings as the layout itself."""

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
    """Local parameters of a short model.

    Attributes:
        before, after: outside the layers; tied parameters are in both.
        layers: for each layer of the short model.
        tied: parameters of `after` that are tied to `before`.
        experts: indices of layers whose experts are sharded over expert-parallel ranks.
        buffers (`int`): bytes of buffers, such as rotary tables.
    """

    before: tuple[LocalParameter, ...]
    layers: tuple[tuple[LocalParameter, ...], ...]
    after: tuple[LocalParameter, ...]
    tied: tuple[LocalParameter, ...]
    experts: frozenset[int]
    buffers: int


def plan_unit_parameters(
    short: ShortModel, layout: MegatronConfig, itemsize: int, training: Training = WHOLE
) -> UnitParameters:
    """Plans a short model on a layout without its pipeline, and returns the local parameters of rank 0.

    Args:
        layout: with its `dp_size`, and one stage.
        itemsize (`int`): bytes of a weight's entry.
        training (`Training`, *optional*): trained parts of the model; adapters are not counted here.

    Raises:
        MegatronError: the layout does not fit the model, with the reason.
    """
    axes = Axes.of(layout, 0)
    model = copy.deepcopy(short.model)
    state = plan(model, layout, axes)
    units = short.unit_by_module
    # Modality encoders run before the language model's layers, but some are defined after them.
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

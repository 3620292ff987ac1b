"""Layers whose sublayers are in parallel lists, which the model's loop calls separately and sums itself."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..compat.instance_patches import mix_into
from .boundary import StageBoundary
from .layer_output_proxy import LayerOutputProxy
from .off_stage_module import Placeholder, replace_module


class OffStagePart(Placeholder):
    """Placeholder for a sublayer of an off-stage layer; passes on `[batch, sequence, hidden]`, which is not read."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _passed(hidden_states)


class StagedPart:
    """Mixin of an on-stage sublayer, which is skipped in other stages of its rank and in trial forwards."""

    _stage_boundary: StageBoundary
    _layer_index: int

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        boundary = self._stage_boundary
        boundary.require_running()
        start, stop = boundary.stages.ranges[boundary.stage]
        if boundary.is_trial or not start <= self._layer_index < stop:
            return _passed(hidden_states)
        return super().__call__(hidden_states, *args, **kwargs)  # type: ignore[misc]


def stand_for_parts(
    model: nn.Module, names: Iterable[str], layer: int, boundary: StageBoundary, place: str | None
) -> dict[str, nn.Module]:
    """Prepares the sublayers of a layer for the pipeline.

    Args:
        place (`str`, *optional*): the stage of the layer, in words, if it is off-stage.

    Returns:
        name -> sublayer that a placeholder has replaced.
    """
    parts = {name: model.get_submodule(name) for name in names}
    for name, part in parts.items():
        if place is None:
            mix_into(part, StagedPart, _stage_boundary=boundary, _layer_index=layer)
        else:
            replace_module(model, name, OffStagePart(part, place, boundary))
    return {} if place is None else parts


def _passed(hidden_states: Tensor) -> Tensor:
    """Returns hidden states `[batch, sequence, hidden]` as a tensor whose first entry is itself, like a tuple's."""
    return hidden_states.detach().as_subclass(LayerOutputProxy)

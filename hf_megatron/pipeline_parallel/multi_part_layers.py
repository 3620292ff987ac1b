"""Layers whose parts lie in lists beside each other, which a model's loop calls one by one and adds up itself."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..compat.instance_patches import mix_into
from .boundary import StageBoundary
from .layer_output_proxy import LayerOutputProxy
from .off_stage_module import Placeholder, replace_module


class OffStagePart(Placeholder):
    """Stands where a part of another rank's layer is: passes `[batch, sequence, hidden]`, which nobody reads."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _passed(hidden_states)


class StagedPart:
    """Mixin of a part of a layer that this rank owns, which does nothing in its other stages and in rehearsals."""

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
    """Has the parts of a layer take part in the pipeline; returns those, by name, that something stands for now.

    Args:
        place (`str`, *optional*): where the layer is, if it is another rank's.
    """
    parts = {name: model.get_submodule(name) for name in names}
    for name, part in parts.items():
        if place is None:
            mix_into(part, StagedPart, _stage_boundary=boundary, _layer_index=layer)
        else:
            replace_module(model, name, OffStagePart(part, place, boundary))
    return {} if place is None else parts


def _passed(hidden_states: Tensor) -> Tensor:
    """Returns hidden states for a caller of them or of their first entry."""
    return hidden_states.detach().as_subclass(LayerOutputProxy)

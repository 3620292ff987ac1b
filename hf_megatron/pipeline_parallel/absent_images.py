"""What stages, and microbatches, without images are called with, and what towers return there."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..media import is_of_images, pixels_of, placeholders, without_pixels
from ..spec import ModelSpec
from .boundary import StageBoundary
from .stage_parts import ForeignInput


class AbsentFeatures(BaseModelOutputWithPooling):
    """Features of no images, or zeros `[placeholders, hidden]`, and nothing else of what towers return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class AbsentImages:
    """Fits calls of a model to stages that have no tower.

    Args:
        model (`PreTrainedModel`): with stages on several ranks.
        forward (`Callable`): its own.
    """

    def __init__(self, model: Any, spec: ModelSpec, forward: Callable[..., Any]) -> None:
        self._config, self._required = model.config, dict.fromkeys(required_images(forward))
        self._argument, _, self._entry = (spec.features_argument or "").partition(".")

    def arguments(self, given: dict[str, Any], stage: int) -> dict[str, Any]:
        """Returns the arguments of a stage: images for the first one, and for the others their places and sizes."""
        found = self._required | without_pixels(given) if stage else given
        if not self._argument or pixels_of(found) is not None or found.get(self._argument) is not None:
            return found
        count, width = int(placeholders(found, self._config).sum()), self._config.get_text_config().hidden_size
        zeros = torch.zeros(count, width, device=found["input_ids"].device)
        features = {self._entry: AbsentFeatures(pooler_output=zeros)} if self._entry else zeros
        return self._required | found | {self._argument: features}


def required_images(forward: Callable[..., Any]) -> list[str]:
    """Lists the arguments of images that a forward cannot be called without."""
    parameters = inspect.signature(forward).parameters.items()
    return [name for name, of in parameters if of.default is inspect.Parameter.empty and is_of_images(name)]


class ForeignTower(ForeignInput):
    """Stands where a tower of images is on later stages, and returns nothing where it is given nothing."""

    def standing_for(self, module: nn.Module) -> "ForeignTower":
        return ForeignTower(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if _has_tensors(args, kwargs) else AbsentFeatures()


def _has_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def call_in_first_stage(tower: nn.Module, boundary: StageBoundary) -> None:
    """Has a tower return nothing in later stages of its rank, where it is given nothing.

    It keeps its class, by which its outputs are recorded.
    """
    own = tower.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if boundary.stage == 0 or _has_tensors(args, kwargs) else AbsentFeatures()

    tower.forward = forward  # type: ignore[method-assign]

"""What stages, and microbatches, without images are called with."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..media import is_of_images, pixels_of, placeholders, without_pixels
from ..spec import ModelSpec


class AbsentFeatures(BaseModelOutputWithPooling):
    """Zeros where features of images belong, `[placeholders, hidden]`, and nothing else of what towers return."""

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
        self._config = model.config
        self._argument, _, self._entry = (spec.features_argument or "").partition(".")
        parameters = inspect.signature(forward).parameters
        required = [name for name, of in parameters.items() if of.default is inspect.Parameter.empty]
        self._required = dict.fromkeys(filter(is_of_images, required))

    def arguments(self, given: dict[str, Any], stage: int) -> dict[str, Any]:
        """Returns the arguments of a stage: images for the first one, and for the others their places and sizes."""
        found = without_pixels(given) if stage else given
        if not self._argument or pixels_of(found) is not None or found.get(self._argument) is not None:
            return found
        count, width = int(placeholders(found, self._config).sum()), self._config.get_text_config().hidden_size
        zeros = torch.zeros(count, width, device=found["input_ids"].device)
        features = {self._entry: AbsentFeatures(pooler_output=zeros)} if self._entry else zeros
        return self._required | found | {self._argument: features}

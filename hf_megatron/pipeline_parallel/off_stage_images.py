"""What stages, and microbatches, without images are called with, and what towers return there."""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..models.modalities.images import get_pixels, is_image_argument, placeholders, without_pixels
from ..models.spec import ModelSpec
from .boundary import StageBoundary
from .microbatches import describe
from .module_mixins import OffStageInput, OffStagePositions
from .off_stage_module import Placeholder


class OffStageFeatures(BaseModelOutputWithPooling):
    """Features of no images, or zeros `[placeholders, hidden]`, and nothing else of what towers return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class OffStageImages:
    """Fits calls of a model to stages that have no tower.

    Args:
        model (`PreTrainedModel`): with stages on several ranks.
        forward (`Callable`): its own.
        boundary (`StageBoundary`): of its stages.
    """

    def __init__(self, model: Any, spec: ModelSpec, forward: Callable[..., Any], boundary: StageBoundary) -> None:
        self._config, self._required = model.config, dict.fromkeys(required_images(forward))
        self._boundary, self._parameters = boundary, inspect.signature(forward).parameters
        self._argument, _, self._entry = (spec.pp.image_features_argument or "").partition(".")
        # An encoder is asked for what it made.
        self._stand_before = bool(spec.pp.prefix_modules) or self._config.is_encoder_decoder

    def describe(self, arguments: dict[str, Any]) -> tuple:
        """Returns what decides the shapes that travel between stages; see `microbatches.describe`."""
        are_read_later = not self._parameters.keys().isdisjoint(self._boundary.carried.arguments)
        pixels = get_pixels(arguments) if self._stand_before or are_read_later else None
        return describe(arguments) if pixels is None else (*describe(arguments), tuple(pixels.shape))

    def arguments(self, given: dict[str, Any], stage: int, *, is_probe: bool = False) -> dict[str, Any]:
        """Returns the arguments of a stage: images for the first one, and for the others their places and sizes.

        Later stages are given what the first one made of images for layers that read it, too.

        Args:
            is_probe (`bool`): for a trial forward, in which no layer reads them.
        """
        found: dict[str, Any] = self._required | without_pixels(given) if stage and not self._stand_before else given
        if stage and (not is_probe or get_pixels(given) is not None):
            found = found | self._boundary.made_on_first(self._parameters, is_probe=is_probe)
        if not self._argument or get_pixels(found) is not None or found.get(self._argument) is not None:
            return found
        count, width = int(placeholders(found, self._config).sum()), self._config.get_text_config().hidden_size
        zeros = torch.zeros(count, width, device=found["input_ids"].device)
        features = {self._entry: OffStageFeatures(pooler_output=zeros)} if self._entry else zeros
        return self._required | found | {self._argument: features}


def required_images(forward: Callable[..., Any]) -> list[str]:
    """Lists the arguments of images that a forward cannot be called without."""
    parameters = inspect.signature(forward).parameters.items()
    return [name for name, of in parameters if of.default is inspect.Parameter.empty and is_image_argument(name)]


class OffStageEncoder(OffStageInput):
    """Stands where a tower of images is on later stages, and returns nothing where it is given nothing."""

    def make_placeholder(self, module: nn.Module) -> "OffStageEncoder":
        return OffStageEncoder(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if _has_tensors(args, kwargs) else OffStageFeatures()


class OffStagePrefix(OffStageInput):
    """Stands where a module is whose outputs are set before the text: zeros, as long as those."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        super().__init__(name, module, place, boundary)
        # No part of this one: it stays on the meta device, without weights.
        self.__dict__["_original"] = module

    def make_placeholder(self, module: nn.Module) -> "OffStagePrefix":
        return OffStagePrefix(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._stage_boundary.is_running:
            return Placeholder.forward(self, *args, **kwargs)
        follower = self.get_buffer("_follower")

        def without_values(value: Any) -> Any:
            return value.to("meta") if isinstance(value, Tensor) else value

        def zeros(like: Any) -> Any:
            is_tensor = isinstance(like, Tensor)
            return torch.zeros(like.shape, dtype=follower.dtype, device=follower.device) if is_tensor else like

        with torch.no_grad():
            made = self._original(
                *map(without_values, args), **{name: without_values(of) for name, of in kwargs.items()}
            )
        return type(made)(**{name: zeros(of) for name, of in made.items()}) if isinstance(made, dict) else zeros(made)


class OffStageShapes(OffStagePrefix):
    """Stands where a module with parts is that every stage runs: on weights of zeros, for its masks and its lengths."""

    def make_placeholder(self, module: nn.Module) -> "OffStageShapes":
        return OffStageShapes(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._stage_boundary.is_running:
            return Placeholder.forward(self, *args, **kwargs)
        follower = self.get_buffer("_follower")

        def zeros(like: Tensor) -> Tensor:
            # One number, however many the weight has.
            dtype = follower.dtype if like.is_floating_point() else like.dtype
            return torch.zeros((), dtype=dtype, device=follower.device).expand(like.shape)

        named = (*self._original.named_parameters(), *self._original.named_buffers())
        weights = {name: zeros(of) for name, of in named}
        with torch.no_grad():
            return torch.func.functional_call(self._original.eval(), weights, args, kwargs)


def get_input_class(module: nn.Module, *, is_prefix: bool, runs_everywhere: bool) -> type[OffStageInput]:
    """Returns what stands for a module before the layers on later stages.

    Args:
        is_prefix (`bool`): what it makes stands before the text, or has another length than what it is given.
        runs_everywhere (`bool`): all stages have to run it.
    """
    if not runs_everywhere:
        return OffStagePrefix if is_prefix else OffStageInput
    return OffStagePositions if next(module.children(), None) is None else OffStageShapes


class StagedPrefix:
    """Mixin of such a module on a rank that holds the first stage and later ones, which read the length alone."""

    _stage_boundary: StageBoundary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._stage_boundary.stage == 0 else torch.no_grad():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class StagedChange:
    """Mixin of a module behind an encoder's layers that changes their length, which other stages of its rank read."""

    _stage_boundary: StageBoundary
    _stage: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._stage_boundary.stage == self._stage else torch.no_grad():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _has_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def call_in_first_stage(encoder: nn.Module, boundary: StageBoundary) -> None:
    """Has a tower return nothing in later stages of its rank, where it is given nothing.

    It keeps its class, by which its outputs are recorded.
    """
    own = encoder.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if boundary.stage == 0 or _has_tensors(args, kwargs) else OffStageFeatures()

    encoder.forward = forward  # type: ignore[method-assign]

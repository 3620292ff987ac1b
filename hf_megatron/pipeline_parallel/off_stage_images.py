"""Image inputs of a pipelined model: arguments of stages and microbatches without images, and encoder placeholders."""

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
    """Output of a skipped vision encoder: no features, or zeros `[placeholders, hidden]`; other fields are `None`."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class OffStageImages:
    """Adapts the arguments of a call to stages without the vision encoder.

    Args:
        model (`PreTrainedModel`): model with stages on several ranks.
        forward (`Callable`): the model's own forward.
        boundary (`StageBoundary`): boundary of its stages.
    """

    def __init__(self, model: Any, spec: ModelSpec, forward: Callable[..., Any], boundary: StageBoundary) -> None:
        self._config, self._required = model.config, dict.fromkeys(required_images(forward))
        self._boundary, self._parameters = boundary, inspect.signature(forward).parameters
        self._argument, _, self._entry = (spec.pp.image_features_argument or "").partition(".")
        # Prefix modules and encoder-decoders need the shapes of pixels on every stage.
        self._stand_before = bool(spec.pp.prefix_modules) or self._config.is_encoder_decoder

    def describe(self, arguments: dict[str, Any]) -> tuple:
        """Returns a key that determines the shapes sent between stages; see `microbatches.describe`."""
        are_read_later = not self._parameters.keys().isdisjoint(self._boundary.carried.arguments)
        pixels = get_pixels(arguments) if self._stand_before or are_read_later else None
        return describe(arguments) if pixels is None else (*describe(arguments), tuple(pixels.shape))

    def arguments(self, call_arguments: dict[str, Any], stage: int, *, is_probe: bool = False) -> dict[str, Any]:
        """Returns the arguments of a stage: with pixels on the first one, and without them on later ones.

        Later stages also get the values that the first stage computed from images for their layers.

        Args:
            is_probe (`bool`): whether it is a trial forward, in which no layer reads them.
        """
        arguments: dict[str, Any] = (
            self._required | without_pixels(call_arguments) if stage and not self._stand_before else call_arguments
        )
        if stage and (not is_probe or get_pixels(call_arguments) is not None):
            arguments = arguments | self._boundary.made_on_first(self._parameters, is_probe=is_probe)
        if not self._argument or get_pixels(arguments) is not None or arguments.get(self._argument) is not None:
            return arguments
        # A batch without images: zeros [placeholders, hidden] as features.
        count, width = int(placeholders(arguments, self._config).sum()), self._config.get_text_config().hidden_size
        zeros = torch.zeros(count, width, device=arguments["input_ids"].device)
        features = {self._entry: OffStageFeatures(pooler_output=zeros)} if self._entry else zeros
        return self._required | arguments | {self._argument: features}


def required_images(forward: Callable[..., Any]) -> list[str]:
    """Returns the image arguments that a forward requires."""
    parameters = inspect.signature(forward).parameters.items()
    return [name for name, of in parameters if of.default is inspect.Parameter.empty and is_image_argument(name)]


class OffStageEncoder(OffStageInput):
    """Placeholder for a vision encoder on later stages; returns empty features if it is called without tensors."""

    def make_placeholder(self, module: nn.Module) -> "OffStageEncoder":
        return OffStageEncoder(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) if _has_tensors(args, kwargs) else OffStageFeatures()


class OffStagePrefix(OffStageInput):
    """Placeholder for a module whose outputs precede the text tokens; returns zeros in the shapes of its outputs."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        super().__init__(name, module, place, boundary)
        # Stored outside `_modules`: it stays on the meta device, without weights.
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

        # Run on the meta device: only the shapes of the outputs are computed.
        with torch.no_grad():
            outputs = self._original(
                *map(without_values, args), **{name: without_values(of) for name, of in kwargs.items()}
            )
        return (
            type(outputs)(**{name: zeros(of) for name, of in outputs.items()})
            if isinstance(outputs, dict)
            else zeros(outputs)
        )


class OffStageShapes(OffStagePrefix):
    """Placeholder for a module with children that every stage runs: with zero weights, for its masks and lengths."""

    def make_placeholder(self, module: nn.Module) -> "OffStageShapes":
        return OffStageShapes(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._stage_boundary.is_running:
            return Placeholder.forward(self, *args, **kwargs)
        follower = self.get_buffer("_follower")

        def zeros(like: Tensor) -> Tensor:
            # Expanded from one element: no memory in the size of the weight.
            dtype = follower.dtype if like.is_floating_point() else like.dtype
            return torch.zeros((), dtype=dtype, device=follower.device).expand(like.shape)

        named = (*self._original.named_parameters(), *self._original.named_buffers())
        weights = {name: zeros(of) for name, of in named}
        with torch.no_grad():
            return torch.func.functional_call(self._original.eval(), weights, args, kwargs)


def get_input_class(module: nn.Module, *, is_prefix: bool, runs_everywhere: bool) -> type[OffStageInput]:
    """Returns the class of the placeholder for a module before the layers, on later stages.

    Args:
        is_prefix (`bool`): whether its output precedes the text, or has another length than its input.
        runs_everywhere (`bool`): whether all stages have to run it.
    """
    if not runs_everywhere:
        return OffStagePrefix if is_prefix else OffStageInput
    return OffStagePositions if next(module.children(), None) is None else OffStageShapes


class StagedPrefix:
    """Mixin of an on-stage prefix module; later stages of its rank read only the length of its output."""

    _stage_boundary: StageBoundary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._stage_boundary.stage == 0 else torch.no_grad():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class StagedChange:
    """Mixin of a module after the encoder's layers that changes the length, which other stages of its rank read."""

    _stage_boundary: StageBoundary
    _stage: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._stage_boundary.stage == self._stage else torch.no_grad():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _has_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def call_in_first_stage(encoder: nn.Module, boundary: StageBoundary) -> None:
    """Patches a vision encoder to return empty features in later stages of its rank, if called without tensors.

    The module keeps its class, because transformers records outputs by class.
    """
    original = encoder.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if boundary.stage == 0 or _has_tensors(args, kwargs) else OffStageFeatures()

    encoder.forward = forward  # type: ignore[method-assign]

"""Modules of a pipelined model on one rank: mixins for on-stage modules, and placeholders for off-stage ones."""

import inspect
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.off_stage import OffStageActivation
from ..errors import PlanError
from .boundary import StageBoundary
from .off_stage_module import Placeholder

_TOKENS = ("input_ids", "inputs_embeds")


class StagedLayer:
    """Mixin of an on-stage layer; its `__call__` wraps hooks, gradient checkpointing and compilation."""

    _stage_boundary: StageBoundary
    _layer_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage_boundary.pass_layer(self._layer_index, super().__call__, args, kwargs)  # type: ignore[misc]


class OffStageLayer(Placeholder):
    """Placeholder for an off-stage layer: has its plain attributes and passes on `[batch, sequence, hidden]`."""

    def __init__(self, layer: nn.Module, place: str, boundary: StageBoundary, index: int):
        super().__init__(layer, place, boundary)
        self._stage_boundary, self._layer_index = boundary, index

    def make_placeholder(self, module: nn.Module) -> "OffStageLayer":
        return OffStageLayer(module, self._place, self._stage_boundary, self._layer_index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # User hooks run only in forwards that run layers of this list.
        if self._stage_boundary.is_trial or self._stage_boundary.is_left_out(self._layer_index):
            return self.forward(*args, **kwargs)
        # Bypasses the layer class's own `__call__` (gradient checkpointing): there is nothing to recompute.
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage_boundary.pass_layer(self._layer_index, self._call_off_stage, args, kwargs)

    def _call_off_stage(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"Layer {self._layer_index} was called, but its pipeline stage is on another rank.")


def layer_indices(module: nn.Module) -> list[int]:
    """Returns the indices of the layers that a module is or wraps."""
    if isinstance(module, StagedLayer | OffStageLayer):
        return [module._layer_index]
    return [index for part in module.children() for index in layer_indices(part)]


def hold_parts(module: nn.Module, kept: Collection[str], name: str, place: str, boundary: StageBoundary) -> None:
    """Keeps the children of a module before the layers that the head is tied to; replaces the others by placeholders.

    Args:
        kept: names of the children to keep.
        name (`str`): name of the module in the model.
        place (`str`): the stage that has the other children, in words.
    """
    for part, child in list(module.named_children()):
        if part not in kept:
            setattr(module, part, OffStageInput(f"{name}.{part}", child, place, boundary))


class OffStageInput(Placeholder):
    """Placeholder on later stages for a module before the layers; returns zeros `[batch, sequence, hidden]`.

    A module that keeps its input's width returns its input.
    """

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        # Set directly: `super().__init__` creates the children's placeholders, which read it.
        self.__dict__["_name"] = name
        super().__init__(module, place, boundary)
        self._stage_boundary = boundary
        self._width = output_width(module)

    def make_placeholder(self, module: nn.Module) -> "OffStageInput":
        return OffStageInput(self._name, module, self._place, self._stage_boundary)

    def _part(self, name: str, child: nn.Module) -> Placeholder:
        # Multimodal models call the token embedding directly and merge image features into its output.
        if isinstance(child, nn.Embedding):
            return OffStageInput(f"{self._name}.{name}", child, self._place, cast(StageBoundary, self._progress))
        return super()._part(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        _require_before_layers(self._name, self._stage_boundary)
        embedded = _embedded(self._name, args, kwargs, is_table=issubclass(self._kind, nn.Embedding))
        zeros = _nothing(embedded, self._width, self.get_buffer("_follower"))
        if self._stage_boundary.is_running:
            return zeros
        # Called by user code: the next pipelined call reads the first stage's values only.
        return OffStageActivation(zeros.to("meta"), zeros.device, self._place)


class OffStagePositions(OffStageInput):
    """Placeholder for a module before the layers that every stage runs; its weights are off-stage tensors."""

    def make_placeholder(self, module: nn.Module) -> "OffStagePositions":
        return OffStagePositions(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _require_before_layers(self._name, self._stage_boundary)
        return self._kind.forward(self, *args, **kwargs)


class OffStageBetween(OffStageInput):
    """Placeholder for a module between encoder and decoder layers, on stages that do not read its output."""

    def make_placeholder(self, module: nn.Module) -> "OffStageBetween":
        return OffStageBetween(self._name, module, self._place, self._stage_boundary)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _nothing(hidden_states, self._width, hidden_states)


class StagedBetween:
    """Mixin of an on-stage module between encoder and decoder layers; returns zeros in other stages of its rank."""

    _stage_boundary: StageBoundary
    _stage: int
    _width: int | None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._stage_boundary.stage == self._stage or not self._stage_boundary.is_running:
            return super().__call__(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return _nothing(hidden_states, self._width, hidden_states)


class StagedInput:
    """Mixin of an on-stage module before the layers; returns zeros in later stages of its rank.

    The rank of the last stage holds a tied embedding as well.
    """

    _stage_boundary: StageBoundary
    _name: str
    _width: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._stage_boundary.stage == 0:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        _require_before_layers(self._name, self._stage_boundary)
        like = next(self.parameters())  # type: ignore[attr-defined]
        embedded = _embedded(self._name, args, kwargs, is_table=isinstance(self, nn.Embedding))
        return _nothing(embedded, self._width, like)


def _embedded(name: str, args: tuple, kwargs: dict[str, Any], *, is_table: bool) -> Tensor | torch.Size:
    """Returns the input of a module before the layers, `[batch, sequence]` or `[batch, sequence, x]`, or its shape."""
    if args:
        # Learned position embeddings take the attention mask of the full past as first argument.
        positions = kwargs.get("position_ids")
        source = args[0] if positions is None else positions
        # Position tables may be called with a slice of the embeddings, or with a shape, to read the shape only.
        is_shape = not isinstance(source, Tensor) or (is_table and source.is_floating_point())
        return torch.Size(source if isinstance(source, tuple) else source.shape) if is_shape else source
    tokens = next((kwargs[key] for key in _TOKENS if kwargs.get(key) is not None), None)
    if tokens is None:
        raise PlanError(
            f"{name} is called with {', '.join(kwargs)}: later pipeline stages cannot derive the shape of its output "
            "from them."
        )
    return tokens


def _nothing(x: Tensor | torch.Size, width: int | None, like: Tensor) -> Tensor:
    """Returns zeros in the shape of a module's output, with the dtype of `like`.

    Args:
        x: input of the module, `[batch, sequence]` or `[batch, sequence, x]`, or its shape.
        width (`int`, *optional*): last dim of the output; `None` if the module keeps its input's.
    """
    if isinstance(x, torch.Size):
        return torch.zeros((*x, *([] if width is None else [width])), dtype=like.dtype, device=like.device)
    if width is None:
        return x
    return torch.zeros(
        (*(x.shape[:-1] if x.is_floating_point() else x.shape), width), dtype=like.dtype, device=x.device
    )


class OffStageOutput(Placeholder):
    """Placeholder on earlier stages for a module after the layers, which they never reach."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        # Set directly: `super().__init__` creates the children's placeholders, which read it.
        self.__dict__["_name"] = name
        super().__init__(module, place, boundary)
        # Models access children of their head.
        self.hold_parts()
        self._stage_boundary = boundary

    def _part(self, name: str, child: nn.Module) -> Placeholder:
        return OffStageOutput(f"{self._name}.{name}", child, self._place, cast(StageBoundary, self._progress))

    def make_placeholder(self, module: nn.Module) -> "OffStageOutput":
        return OffStageOutput(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"{self._name} is defined after the layers but runs before them; its family needs a spec.")


def _require_before_layers(name: str, boundary: StageBoundary) -> None:
    if boundary.is_past_layers():
        raise PlanError(
            f"{name} is defined before the layers but runs after them; list it in its family's `after_layers`."
        )


def _tables(module: nn.Module) -> list[nn.Embedding]:
    return [child for child in module.children() if isinstance(child, nn.Embedding)]


def embeds_tokens(module: nn.Module) -> bool:
    """Returns whether a module before the layers has its own embedding tables, as BERT's embeddings do."""
    tables = len(_tables(module))
    return tables > 1 or tables == 1 and _TOKENS[0] in inspect.signature(type(module).forward).parameters


def convolves(module: nn.Module) -> bool:
    """Returns whether a module has convolutions, whose output has another length than their input."""
    return any(isinstance(part, nn.Conv1d | nn.Conv2d) for part in module.modules())


def output_width(module: nn.Module) -> int | None:
    """Returns the last dim of the output of an embedding or a linear; `None` for modules that keep their input's.

    A module with several embedding tables sums their outputs.
    """
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if embeds_tokens(module):
        widths = {table.embedding_dim for table in _tables(module)}
        return widths.pop() if len(widths) == 1 else None
    return module.out_features if isinstance(module, nn.Linear) else None

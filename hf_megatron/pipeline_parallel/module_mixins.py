"""Modules on a rank of a pipeline: its own, which take part in its stages, and what stands for those of other ranks."""

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
    """Mixin of a layer that this rank owns; it stands around hooks, gradient checkpointing and compilation."""

    _stage_boundary: StageBoundary
    _layer_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage_boundary.pass_layer(self._layer_index, super().__call__, args, kwargs)  # type: ignore[misc]


class OffStageLayer(Placeholder):
    """Stands where another rank's layer is: its plain attributes; passes `[batch, sequence, hidden]`."""

    def __init__(self, layer: nn.Module, place: str, boundary: StageBoundary, index: int):
        super().__init__(layer, place, boundary)
        self._stage_boundary, self._layer_index = boundary, index

    def make_placeholder(self, module: nn.Module) -> "OffStageLayer":
        return OffStageLayer(module, self._place, self._stage_boundary, self._layer_index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Hooks belong to forwards that run layers, this one or others of its list.
        if self._stage_boundary.is_trial or self._stage_boundary.is_left_out(self._layer_index):
            return self.forward(*args, **kwargs)
        # Past what the layer's own class does around its forward: there is nothing to compute again.
        return nn.Module.__call__(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage_boundary.pass_layer(self._layer_index, self._call_off_stage, args, kwargs)

    def _call_off_stage(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"Layer {self._layer_index} was called in a stage that lies on another rank.")


def layer_indices(module: nn.Module) -> list[int]:
    """Returns the places of the layers that a module is or wraps."""
    if isinstance(module, StagedLayer | OffStageLayer):
        return [module._layer_index]
    return [index for part in module.children() for index in layer_indices(part)]


def hold_parts(module: nn.Module, kept: Collection[str], name: str, place: str, boundary: StageBoundary) -> None:
    """Leaves of a module before the layers the parts that the head is tied to; the rest lies elsewhere."""
    for part, child in list(module.named_children()):
        if part not in kept:
            setattr(module, part, OffStageInput(f"{name}.{part}", child, place, boundary))


class OffStageInput(Placeholder):
    """Stands where a module before the layers is on later stages: zeros `[batch, sequence, hidden]`, or its input."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        # Its parts ask for it, before modules can have attributes.
        self.__dict__["_name"] = name
        super().__init__(module, place, boundary)
        self._stage_boundary = boundary
        self._width = output_width(module)

    def make_placeholder(self, module: nn.Module) -> "OffStageInput":
        return OffStageInput(self._name, module, self._place, self._stage_boundary)

    def _part(self, name: str, child: nn.Module) -> Placeholder:
        # Models of images and text call a table of tokens by itself, and hand in what it made with images among it.
        if isinstance(child, nn.Embedding):
            return OffStageInput(f"{self._name}.{name}", child, self._place, cast(StageBoundary, self._progress))
        return super()._part(name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        _require_before_layers(self._name, self._stage_boundary)
        embedded = _embedded(self._name, args, kwargs, is_table=issubclass(self._kind, nn.Embedding))
        found = _nothing(embedded, self._width, self.get_buffer("_follower"))
        if self._stage_boundary.is_running:
            return found
        # A loop's own call, of which the next pipelined call reads the first stage's values only.
        return OffStageActivation(found.to("meta"), found.device, self._place)


class OffStagePositions(OffStageInput):
    """Stands where a module before the layers is that every stage runs: what it makes of its weights has no values."""

    def make_placeholder(self, module: nn.Module) -> "OffStagePositions":
        return OffStagePositions(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _require_before_layers(self._name, self._stage_boundary)
        return self._kind.forward(self, *args, **kwargs)


class OffStageBetween(OffStageInput):
    """Stands where a module between an encoder's layers and a decoder's is on other stages, which do not read it."""

    def make_placeholder(self, module: nn.Module) -> "OffStageBetween":
        return OffStageBetween(self._name, module, self._place, self._stage_boundary)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _nothing(hidden_states, self._width, hidden_states)


class StagedBetween:
    """Mixin of such a module on its own rank, in whose other stages it does nothing."""

    _stage_boundary: StageBoundary
    _stage: int
    _width: int | None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._stage_boundary.stage == self._stage or not self._stage_boundary.is_running:
            return super().__call__(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return _nothing(hidden_states, self._width, hidden_states)


class StagedInput:
    """Mixin of a module before the layers on a rank that holds later stages too, where it does nothing.

    The rank of the last stage also holds an embedding that its head is tied to.
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
    """Finds what a module before the layers embeds, `[batch, sequence]` or `[batch, sequence, x]`, or its shape."""
    if args:
        # Learned positions take the mask of the whole past first.
        positions = kwargs.get("position_ids")
        given = args[0] if positions is None else positions
        # Tables of positions may be given one number of each embedding for their shape, or that.
        is_shape = not isinstance(given, Tensor) or (is_table and given.is_floating_point())
        return torch.Size(given if isinstance(given, tuple) else given.shape) if is_shape else given
    found = next((kwargs[given] for given in _TOKENS if kwargs.get(given) is not None), None)
    if found is None:
        raise PlanError(f"{name} is called with {', '.join(kwargs)}, of which no stage behind it can tell its shape.")
    return found


def _nothing(x: Tensor | torch.Size, width: int | None, like: Tensor) -> Tensor:
    """Makes zeros in the shape of what a module makes of `x`, or of what has its shape; `like` has their dtype."""
    if isinstance(x, torch.Size):
        return torch.zeros((*x, *([] if width is None else [width])), dtype=like.dtype, device=like.device)
    if width is None:
        return x
    return torch.zeros(
        (*(x.shape[:-1] if x.is_floating_point() else x.shape), width), dtype=like.dtype, device=x.device
    )


class OffStageOutput(Placeholder):
    """Stands where a module behind the layers is on earlier stages, which never reach it."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        # Its parts ask for it, before modules can have attributes.
        self.__dict__["_name"] = name
        super().__init__(module, place, boundary)
        # Heads are asked for parts of theirs.
        self.hold_parts()
        self._stage_boundary = boundary

    def _part(self, name: str, child: nn.Module) -> Placeholder:
        return OffStageOutput(f"{self._name}.{name}", child, self._place, cast(StageBoundary, self._progress))

    def make_placeholder(self, module: nn.Module) -> "OffStageOutput":
        return OffStageOutput(self._name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"{self._name} is defined behind the layers but runs before them; its family needs a spec.")


def _require_before_layers(name: str, boundary: StageBoundary) -> None:
    if boundary.is_past_layers():
        raise PlanError(
            f"{name} is defined before the layers but runs behind them; name it in its family's `after_layers`."
        )


def _tables(module: nn.Module) -> list[nn.Embedding]:
    return [child for child in module.children() if isinstance(child, nn.Embedding)]


def embeds_tokens(module: nn.Module) -> bool:
    """Tells whether a module before the layers looks tokens up in tables of its own, as BERT's does."""
    tables = len(_tables(module))
    return tables > 1 or tables == 1 and _TOKENS[0] in inspect.signature(type(module).forward).parameters


def convolves(module: nn.Module) -> bool:
    """Tells whether a module before the layers makes something of other dims by convolutions."""
    return any(isinstance(part, nn.Conv1d | nn.Conv2d) for part in module.modules())


def output_width(module: nn.Module) -> int | None:
    """Returns the last dim of what an embedding or a linear makes; `None` for what keeps its input's.

    Embeddings of a module are added up.
    """
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    if embeds_tokens(module):
        widths = {table.embedding_dim for table in _tables(module)}
        return widths.pop() if len(widths) == 1 else None
    return module.out_features if isinstance(module, nn.Linear) else None

"""Where a stack of layers is cut: what enters a stage's first layer, what leaves its last, what stands for the rest.

The forward of the model stays untouched on every stage: it builds masks, positions and rotary tables. On later stages
the modules before the layers return zeros of the right shape, layers of other stages pass them on, and the stage's
first layer gets what the stage before sent. Behind a stage's last layer the forward is left, so that only the last
stage reaches the final norm, the head and the loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..absent_weights import AbsentActivation, Owner
from ..errors import PlanError, UnsupportedError
from ..patch_ledger import Shared
from ..upstream import recorded_outputs, share_memory
from .partition import Stages
from .placeholder import Placeholder

HIDDEN_STATES = "hidden_states"
ROUTER_LOGITS = "router_logits"


class StageLeft(Exception):
    """Unwinds a model's forward behind the last layer of a stage that is not the last."""

    def __init__(self, outputs: tuple[Tensor, ...]):
        super().__init__("behind the last layer of a pipeline stage")
        self.outputs = outputs


class PassedOn(Tensor):
    """What a layer that is not run hands to the loop in a rehearsal, and by what the next one knows it.

    Operators see a plain tensor, and its first entry is itself, for layers that return tuples.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise UnsupportedError(
            "The model's loop over its layers unpacks several values of each, of which a pipeline passes the hidden "
            "states on. Load it with pp_size=1."
        )

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            return self.as_subclass(Tensor)[index]
        return self if index == 0 else iter(self)


class StageBoundary(Shared):
    """The stage whose forward is under way on this rank, and how layers behave in it.

    Attributes:
        leaving (`Callable`, *optional*): applied to the hidden states that leave a stage.
        stage: the one whose forward is under way.
        is_filled: whether the model's weights are loaded.
        owner (`Owner`, *optional*): knows this rank's parameters, once they are loaded.
        is_rehearsing: whether the forward under way leaves out all layers.
        is_running: whether a forward is under way.
    """

    def __init__(self, stages: Stages):
        self.stages = stages
        self.leaving: Callable[[Tensor], Tensor] | None = None
        self.entered = False
        self.is_filled = False
        self.owner: Owner | None = None
        self.is_rehearsing = self.is_running = False
        self.stage = 0
        self._received: tuple[Tensor, ...] | None = None
        self._zeros: Tensor | None = None

    def run(self, stage: int, received: tuple[Tensor, ...] | None, forward: Callable[[], Any]) -> Any:
        """Runs the model's forward as one stage.

        Args:
            stage (`int`): a stage of this rank.
            received: what the stage before returned, `[batch, sequence, hidden]` first; `None` for the first.
            forward: calls the model's own forward.

        Returns:
            The hidden states and router logits so far, or, from the last stage, what the model returned.
        """
        self.stage, self._received, self.entered, self.is_running = stage, received, False, True
        try:
            output = forward()
        except StageLeft as left:
            return left.outputs
        finally:
            self._received = self._zeros = None
            self.is_running = False
            # Outside of a forward an embedding may be asked for by itself.
            entered, self.entered, self.stage = self.entered, False, 0
        if not entered or stage < len(self.stages.ranges) - 1:
            raise PlanError("A pipeline stage ran through the model without meeting its layers.")
        return output

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Leaves out the layers in forwards inside, which need no other stage then."""
        self.is_rehearsing = True
        try:
            yield
        finally:
            self.is_rehearsing = False

    def pass_layer(self, index: int, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls layer `index` as the present stage has to: not at all, on what was received, or as the last."""
        self._require_running()
        start, stop = self.stages.ranges[self.stage]
        if index < start:
            return self.pass_on(args, kwargs)
        if index >= stop:
            raise PlanError(f"Layer {index} was called outside of its pipeline stage.")
        if index == start:
            self.entered = True
            if self.stage > 0:
                self._require_untouched(index, args, kwargs)
            if self._received is not None:
                args, kwargs = self._enter(args, kwargs)
        output = self.pass_on(args, kwargs) if self.is_rehearsing else call(*args, **kwargs)
        if index == stop - 1 and self.stage < len(self.stages.ranges) - 1:
            self._leave(output)
        return output

    def pass_on(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Returns the same zeros `[batch, sequence, hidden]`, for a caller of them or of their first entry."""
        self._require_running()
        if self._zeros is None:
            zeros = args[0] if args else kwargs[HIDDEN_STATES]
            self._zeros = zeros.detach().as_subclass(PassedOn) if self.is_rehearsing else zeros
            self._version = _version(self._zeros)
        return self._zeros

    def _require_running(self) -> None:
        if not self.is_running:
            raise UnsupportedError(
                "A part of a pipelined model was called by itself: its layers lie on several ranks. Call the whole "
                "model; without labels it returns logits that a loss of your own can be computed from."
            )

    def _require_untouched(self, index: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises where the loop did something to what layer `index - 1` returned, which the stage before left out."""
        zeros, found = self._zeros, args[0] if args else kwargs[HIDDEN_STATES]
        assert zeros is not None
        if (
            (self.is_rehearsing and found is not zeros)
            or not share_memory(found, zeros)
            or _version(zeros) != self._version
        ):
            raise UnsupportedError(
                f"The model's loop changes hidden states between its layers {index - 1} and {index}, where the "
                "pipeline is cut. Cut elsewhere with pipeline_partition, or load it with pp_size=1."
            )

    def _enter(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        assert self._received is not None
        hidden_states, *router_logits = self._received
        recorded = recorded_outputs()
        if router_logits:
            # What the layers of earlier stages would have recorded.
            recorded[ROUTER_LOGITS][:0] = router_logits
        if args and isinstance(args[0], Tensor):
            return (hidden_states, *args[1:]), kwargs
        return args, {**kwargs, HIDDEN_STATES: hidden_states}

    def _leave(self, output: Any) -> None:
        if self.is_rehearsing:
            raise StageLeft(())
        hidden_states = output[0] if isinstance(output, tuple) else output
        if self.leaving is not None:
            hidden_states = self.leaving(hidden_states)
        router_logits = recorded_outputs().get(ROUTER_LOGITS, [])
        if not all(isinstance(logits, Tensor) for logits in router_logits):
            raise UnsupportedError(
                "output_router_logits: these router logits are no tensors; a pipeline cannot send them."
            )
        raise StageLeft((hidden_states, *router_logits))


class StagedLayer:
    """Mixin of a layer that this rank owns; it stands around hooks, gradient checkpointing and compilation."""

    _stage_boundary: StageBoundary
    _layer_index: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage_boundary.pass_layer(self._layer_index, super().__call__, args, kwargs)  # type: ignore[misc]


class ForeignLayer(Placeholder):
    """Stands where another rank's layer is: its plain attributes; passes `[batch, sequence, hidden]`."""

    def __init__(self, layer: nn.Module, place: str, boundary: StageBoundary):
        super().__init__(layer, place, boundary)
        plain = (str, int, float, bool, type(None))
        classes = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]
        for names in (*(vars(cls) for cls in reversed(classes)), vars(layer)):
            for name, value in names.items():
                if not name.startswith("_") and name != "training" and isinstance(value, plain):
                    setattr(self, name, value)
        self._stage_boundary = boundary

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        # Hooks belong to forwards that run layers.
        if self._stage_boundary.is_rehearsing:
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._stage_boundary.pass_on(args, kwargs)


class ForeignInput(Placeholder):
    """Stands where a module before the layers is on later stages: zeros `[batch, sequence, hidden]`, or its input."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        super().__init__(module, place, boundary)
        self.name, self._stage_boundary = name, boundary
        self.width = output_width(module)

    def standing_for(self, module: nn.Module) -> "ForeignInput":
        return ForeignInput(self.name, module, self._place, self._stage_boundary)

    def forward(self, x: Tensor, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        _require_before_layers(self.name, self._stage_boundary)
        # Learned positions take the mask of the whole past first.
        found = _nothing(x if position_ids is None else position_ids, self.width, self.get_buffer("_follower").dtype)
        if self._stage_boundary.is_running:
            return found
        # A loop's own call, of which the next pipelined call reads the first stage's values only.
        return AbsentActivation(found.to("meta"), found.device, self._place)


class StagedInput:
    """Mixin of a module before the layers on a rank that holds later stages too, where it does nothing.

    The rank of the last stage also holds an embedding that its head is tied to.
    """

    _stage_boundary: StageBoundary
    _name: str
    _width: int | None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._stage_boundary.stage == 0:
            return super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        _require_before_layers(self._name, self._stage_boundary)
        dtype = next(self.parameters()).dtype  # type: ignore[attr-defined]
        positions = kwargs.get("position_ids")
        return _nothing(x if positions is None else positions, self._width, dtype)


def _nothing(x: Tensor, width: int | None, dtype: torch.dtype) -> Tensor:
    """Makes zeros in the shape of what a module makes of `x`."""
    if width is None:
        return x
    return torch.zeros((*(x.shape[:-1] if x.is_floating_point() else x.shape), width), dtype=dtype, device=x.device)


class ForeignOutput(Placeholder):
    """Stands where a module behind the layers is on earlier stages, which never reach it."""

    def __init__(self, name: str, module: nn.Module, place: str, boundary: StageBoundary):
        # Its parts ask for it, before modules can have attributes.
        self.__dict__["name"] = name
        super().__init__(module, place, boundary)
        # Heads are asked for parts of theirs.
        self.hold_parts()
        self._stage_boundary = boundary

    def _part(self, name: str, child: nn.Module) -> Placeholder:
        return ForeignOutput(f"{self.name}.{name}", child, self._place, cast(StageBoundary, self._progress))

    def standing_for(self, module: nn.Module) -> "ForeignOutput":
        return ForeignOutput(self.name, module, self._place, self._stage_boundary)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(f"{self.name} is defined behind the layers but runs before them; its family needs a spec.")


def _version(tensor: Tensor) -> int:
    """Counts the edits of a tensor of any shape; of one that was made in inference mode nobody counts them."""
    return 0 if tensor.is_inference() else tensor._version


def _require_before_layers(name: str, boundary: StageBoundary) -> None:
    if boundary.entered:
        raise PlanError(
            f"{name} is defined before the layers but runs behind them; name it in its family's `after_layers`."
        )


def output_width(module: nn.Module) -> int | None:
    """Returns the last dim of what an embedding or a linear makes; `None` for what keeps its input's."""
    if isinstance(module, nn.Embedding):
        return module.embedding_dim
    return module.out_features if isinstance(module, nn.Linear) else None

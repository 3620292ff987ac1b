"""Where a stack of layers is cut: what enters a stage's first layer, what leaves its last, what stands for the rest.

The forward of the model stays untouched on every stage: it builds masks, positions and rotary tables. On later stages
the modules before the layers return zeros of the right shape, layers of other stages pass them on, and the stage's
first layer gets what the stage before sent. Behind a stage's last layer the forward is left, so that only the last
stage reaches the final norm, the head and the loss.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..absent_weights import Owner
from ..errors import PlanError, UnsupportedError
from ..patch_ledger import Shared
from ..upstream import recorded_outputs, share_memory
from .partition import Stages

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


def _version(tensor: Tensor) -> int:
    """Counts the edits of a tensor of any shape; of one that was made in inference mode nobody counts them."""
    return 0 if tensor.is_inference() else tensor._version

"""Runs one rank's actions of a pipeline schedule on one batch.

torch's own runtime fixes the shapes of a stage once, chunks the arguments itself, and runs forward and backward in one
call; batches of changing length, arguments that differ per rank and a deferred backward need more freedom. The order of
the actions is torch's (see `schedules.py`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import detachable
from ..compat.torch_pipelining import backward_inputs, backward_weights
from .boundary import StageBoundary
from .p2p import Arriving, Transport
from .schedules import Action, Kind
from .stage_payload import Message
from .taken_activations import watch_inputs

# (stage, microbatch)
Cell = tuple[int, int]


@dataclass
class BackwardOptions:
    """Inputs and callbacks of an execution's backwards.

    Attributes:
        seeds (`Callable`): microbatch index -> gradients of what `read` returned for it.
        before_weights (`Callable`): called before an action that adds gradients to parameters.
        on_added (`Callable`): called with parameters whose gradients were added without running their hooks.
        keeps_graphs (`bool`): whether backwards may run once more.
    """

    seeds: Callable[[int], tuple[Tensor | None, ...]] = lambda microbatch_idx: ()
    before_weights: Callable[[Action], None] = lambda action: None
    on_added: Callable[[list[nn.Parameter]], None] = lambda parameters: None
    keeps_graphs: bool = False


@dataclass
class CellBuffers:
    """Tensors of the microbatches in flight, by stage and microbatch.

    Attributes:
        inputs: leaves that a stage's forward starts from; none for the first stage.
        layouts: `Message.layout` of the inputs: meanings of the tensors after the hidden states.
        outputs: what a stage's forward returned, with its graph.
        leaving: messages that wait to be sent to the next stage.
        gradients: gradients of a stage's outputs.
        arriving: messages that are being received.
        weight_groups: graph nodes that a split backward left for the weights' step.
    """

    inputs: dict[Cell, tuple[Tensor, ...]] = field(default_factory=dict)
    layouts: dict[Cell, str] = field(default_factory=dict)
    outputs: dict[Cell, tuple[Tensor, ...]] = field(default_factory=dict)
    leaving: dict[Cell, Message] = field(default_factory=dict)
    gradients: dict[Cell, tuple[Tensor, ...]] = field(default_factory=dict)
    arriving: dict[tuple[Kind, int, int], Arriving] = field(default_factory=dict)
    weight_groups: dict[Cell, Any] = field(default_factory=dict)


class Execution:
    """Microbatches of one batch on this rank, from their forwards to their backwards.

    Args:
        boundary (`StageBoundary`): the stages and how they are connected.
        transport (`Transport`): communication with the neighboring ranks.
        forward (`Callable`): microbatch index -> output of the model's own forward.
        microbatches: the arguments of each.
        shape_keys: one per microbatch; equal keys mean equal activation shapes.
        read (`Callable`): (microbatch index, output of the last stage) -> tensors to differentiate.
        rank (`int`): this rank's index in the pipeline.
        parameters: stage -> its trainable parameters, if backward is split.
        splits_backward (`bool`): whether gradients of inputs and weights are computed in two steps.
        record (`Callable`, *optional*): (kind, stage, microbatch) -> a context that measures it.

    Attributes:
        results: on the last stage's rank, what `read` returned for each microbatch, without its graph.
        backward (`BackwardOptions`): seeds and callbacks; set before the backwards run.
        current: (stage, microbatch) whose backward runs at present.
    """

    def __init__(
        self,
        boundary: StageBoundary,
        transport: Transport,
        forward: Callable[[int], Any],
        microbatches: Sequence[dict[str, Any]],
        shape_keys: Sequence[tuple[Hashable, ...]],
        read: Callable[[int, Any], tuple[Tensor, ...]],
        *,
        rank: int,
        parameters: Mapping[int, list[nn.Parameter]],
        splits_backward: bool,
        record: Callable[[str, int, int], AbstractContextManager] | None = None,
    ):
        self.boundary, self.rank, self.transport = boundary, rank, transport
        self.microbatches = microbatches
        self.forward, self.shape_keys, self.read, self.parameters = forward, shape_keys, read, parameters
        self.splits_backward = splits_backward
        self.record = record or (lambda kind, stage, microbatch: nullcontext())
        self.results: list[tuple[Tensor, ...]] = []
        self.backward = BackwardOptions()
        self.current: Cell | None = None
        self._buffers = CellBuffers()
        self._rank_of = boundary.stages.rank_of
        self._last = len(self._rank_of) - 1

    def run(self, actions: Sequence[Action]) -> None:
        """Runs the actions in order, and waits for all sends."""
        for action in actions:
            self.do(action)
        self.transport.flush()

    def do(self, action: Action) -> None:
        """Runs one action with the method named after its kind."""
        getattr(self, f"_{action.kind.name.lower()}")(action)

    def _tag(self, stage: int, microbatch: int, backward: bool) -> int:
        # Unique per receiving stage, microbatch and direction: messages in flight between two ranks must not be mixed.
        return (microbatch * (self._last + 1) + stage) * 2 + backward

    # Forward

    def _receive_forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        peer = self._rank_of[stage - 1]
        with self.record("receive_forward", stage, microbatch):
            arriving = self.transport.receive(
                peer, self._tag(stage, microbatch, False), (stage, self.shape_keys[microbatch])
            )
        # Asynchronous: `_forward` waits for it. Hidden states [batch of the microbatch, local, hidden] and the payload.
        self._buffers.arriving[Kind.FORWARD, stage, microbatch] = arriving

    def _send_forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        peer, tag = self._rank_of[stage + 1], self._tag(stage + 1, microbatch, False)
        with self.record("send_forward", stage, microbatch):
            outputs = self._buffers.leaving.pop((stage, microbatch))
            self.transport.send(outputs, peer, tag, (stage + 1, self.shape_keys[microbatch]))

    def _forward(self, action: Action) -> None:
        stage, microbatch = cell = action.stage, action.microbatch
        if (arriving := self._buffers.arriving.pop((Kind.FORWARD, *cell), None)) is not None:
            with self.record("receive_forward", stage, microbatch):
                self._take_inputs(cell, Message(arriving.wait(), arriving.layout))
        inputs = self._buffers.inputs.get(cell)
        received = None if inputs is None else Message(inputs, self._buffers.layouts.pop(cell))
        with self.record("F", stage, microbatch):
            output = self.boundary.run(stage, received, lambda: self.forward(microbatch))
            if stage == self._last:
                result = self.read(microbatch, output)
                self.results.append(tuple(value.detach() for value in result))
        if stage < self._last:
            result = output.tensors
            self._buffers.leaving[cell] = output
            # Adjacent stages on one rank (V-shaped schedules) pass the message on without communication.
            if self._rank_of[stage + 1] == self.rank:
                self._take_inputs((stage + 1, microbatch), self._buffers.leaving.pop(cell))
        if torch.is_grad_enabled():
            # The graph of this cell is kept until its backward. A split backward needs outputs that can be detached.
            self._buffers.outputs[cell] = tuple(map(detachable, result)) if self.splits_backward else result
        else:
            self._buffers.inputs.pop(cell, None)

    def _take_inputs(self, cell: Cell, message: Message) -> None:
        self._buffers.layouts[cell] = message.layout
        # New leaves: each stage's graph starts at its inputs, and their `.grad` is sent to the previous stage.
        leaves = tuple(tensor.detach() for tensor in message.tensors)
        self._buffers.inputs[cell] = tuple(
            leaf.requires_grad_() if torch.is_grad_enabled() and leaf.is_floating_point() else leaf for leaf in leaves
        )
        watch_inputs(self, cell, leaves)

    # Backward

    @contextmanager
    def _differentiating(self, kind: str, cell: Cell) -> Iterator[None]:
        """Measures a backward, without autocast: it may be on in the user's forward and would cast fp32 gradients."""
        before, self.current = self.current, cell
        try:
            with self.record(kind, *cell), torch.autocast(self.transport.device.type, enabled=False):
                yield
        finally:
            self.current = before

    def _receive_backward(self, action: Action) -> None:
        stage, microbatch = cell = action.stage, action.microbatch
        # Gradients have the shapes of the outputs that this rank sent, so no header is needed.
        shapes = tuple((tuple(output.shape), output.dtype) for output in self._buffers.outputs[cell])
        tag = self._tag(stage, microbatch, True)
        arriving = self.transport.receive_gradients(shapes, self._rank_of[stage + 1], tag)
        self._buffers.arriving[Kind.BACKWARD, stage, microbatch] = arriving

    def _send_backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        peer, tag = self._rank_of[stage - 1], self._tag(stage - 1, microbatch, True)
        with self.record("send_backward", stage, microbatch):
            gradients = Message(self._buffers.gradients.pop((stage - 1, microbatch)))
            self.transport.send(gradients, peer, tag, kind=None)

    def _roots(self, cell: Cell) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns the outputs that a backward starts from, and their gradients."""
        stage, microbatch = cell
        if (arriving := self._buffers.arriving.pop((Kind.BACKWARD, *cell), None)) is not None:
            with self.record("receive_backward", stage, microbatch):
                self._buffers.gradients[cell] = arriving.wait()
        seeds = self.backward.seeds(microbatch) if stage == self._last else self._buffers.gradients.pop(cell)
        outputs = self._buffers.outputs[cell] if self.backward.keeps_graphs else self._buffers.outputs.pop(cell)
        # Integer outputs, such as token indices, have no gradient.
        pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
        return [output for output, _ in pairs], [seed for _, seed in pairs]

    def _hand_back(self, cell: Cell, inputs: tuple[Tensor, ...]) -> None:
        # The previous stage expects one tensor per output: zeros for those that this stage did not use.
        gradients = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs)
        self._buffers.gradients[cell[0] - 1, cell[1]] = gradients
        for leaf in inputs:
            leaf.grad = None

    def _backward(self, action: Action) -> None:
        cell = action.stage, action.microbatch
        roots, seeds = self._roots(cell)
        self.backward.before_weights(action)
        with self._differentiating("B", cell):
            torch.autograd.backward(roots, seeds, retain_graph=self.backward.keeps_graphs)
        inputs = self._buffers.inputs.get(cell) if self.backward.keeps_graphs else self._buffers.inputs.pop(cell, None)
        if inputs is not None:
            self._hand_back(cell, inputs)

    def _backward_input(self, action: Action) -> None:
        cell = action.stage, action.microbatch
        if action.stage == 0:
            # The first stage has no input gradients to send: its whole backward is left to the weights' step.
            return
        roots, seeds = self._roots(cell)
        inputs = self._buffers.inputs.pop(cell)
        # Input gradients only, so that the previous stage can continue; the weights' gradients follow in "W".
        with self._differentiating("I", cell):
            self._buffers.weight_groups[cell] = backward_inputs(roots, seeds, inputs, self.parameters[action.stage])
        self._hand_back(cell, inputs)

    def _backward_weight(self, action: Action) -> None:
        cell = action.stage, action.microbatch
        self.backward.before_weights(action)
        roots, seeds = self._roots(cell) if action.stage == 0 else ([], [])
        with self._differentiating("W", cell):
            if action.stage == 0:
                torch.autograd.backward(roots, seeds)
            else:
                backward_weights(self.parameters[action.stage], self._buffers.weight_groups.pop(cell))
                self.backward.on_added(self.parameters[action.stage])

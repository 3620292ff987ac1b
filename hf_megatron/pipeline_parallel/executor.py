"""Runs one rank's actions of a schedule on one batch.

torch's own runtime fixes the shapes of a stage once, chunks the arguments itself and always goes forward and backward
in one call; batches of changing length, arguments that differ per rank and a backward that comes later need neither.
The order of actions is torch's (see `schedules.py`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import detachable
from ..compat.torch_pipelining import backward_inputs, backward_weights
from .boundary import StageBoundary
from .p2p import Arriving, Transport
from .schedules import Action, Kind
from .stage_payload import Message

Cell = tuple[int, int]


class Execution:
    """The microbatches of one batch on this rank, between their forwards and their backwards.

    Args:
        boundary (`StageBoundary`): the stages and where they are cut.
        rank (`int`): this rank's place in the pipeline.
        transport (`Transport`): to the neighbours.
        forward (`Callable`): microbatch number -> the model's own forward of it.
        microbatches: the arguments of each.
        kinds: one per microbatch, equal for those whose activations have equal shapes.
        read (`Callable`): (microbatch number, what the last stage's forward returned) -> tensors to differentiate.
        parameters: stage -> its trainable parameters, where backward is split.
        splits_backward (`bool`): gradients of inputs and weights are computed in two steps.
        record (`Callable`, *optional*): (kind, stage, microbatch) -> a context that measures it.

    Attributes:
        results: on the last stage's rank, what `read` returned of each microbatch, without its graph.
        seeds (`Callable`): microbatch number -> the gradients of what `read` returned.
        before_backward (`Callable`): called before an action that adds gradients to parameters.
        added (`Callable`): called with parameters whose gradients were added without running their hooks.
        keeps_graphs (`bool`): backwards may be run once more.
    """

    def __init__(
        self,
        boundary: StageBoundary,
        rank: int,
        transport: Transport,
        forward: Callable[[int], Any],
        microbatches: Sequence[dict[str, Any]],
        kinds: Sequence[tuple[Hashable, ...]],
        read: Callable[[int, Any], tuple[Tensor, ...]],
        parameters: Mapping[int, list[nn.Parameter]],
        splits_backward: bool,
        record: Callable[[str, int, int], AbstractContextManager] | None = None,
    ):
        self.boundary, self.rank, self.transport = boundary, rank, transport
        self.microbatches = microbatches
        self.forward, self.kinds, self.read, self.parameters = forward, kinds, read, parameters
        self.splits_backward = splits_backward
        self.record = record or (lambda kind, stage, microbatch: nullcontext())
        self.results: list[tuple[Tensor, ...]] = []
        self.seeds: Callable[[int], tuple[Tensor | None, ...]] = lambda microbatch: ()
        self.before_backward: Callable[[Action], None] = lambda action: None
        self.added: Callable[[list[nn.Parameter]], None] = lambda parameters: None
        self.keeps_graphs = False
        self._rank_of = boundary.stages.rank_of
        self._last = len(self._rank_of) - 1
        self._inputs: dict[Cell, tuple[Tensor, ...]] = {}
        self._outputs: dict[Cell, tuple[Tensor, ...]] = {}
        self._gradients: dict[Cell, tuple[Tensor, ...]] = {}
        self._leaving: dict[Cell, Message] = {}
        self._layouts: dict[Cell, str] = {}
        self._arriving: dict[tuple[Kind, int, int], Arriving] = {}
        self._groups: dict[Cell, Any] = {}

    def run(self, actions: Sequence[Action]) -> None:
        """Does the actions in order, and waits until everything is sent."""
        for action in actions:
            self.do(action)
        self.transport.flush()

    def do(self, action: Action) -> None:
        """Does one action, by the method of its kind's name."""
        getattr(self, f"_{action.kind.name.lower()}")(action)

    def _tag(self, stage: int, microbatch: int, backward: bool) -> int:
        return (microbatch * (self._last + 1) + stage) * 2 + backward

    # Forward

    def _receive_forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        peer = self._rank_of[stage - 1]
        with self.record("receive_forward", stage, microbatch):
            arriving = self.transport.receive(
                peer, self._tag(stage, microbatch, False), (stage, self.kinds[microbatch])
            )
        self._arriving[Kind.FORWARD, stage, microbatch] = arriving

    def _send_forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        peer, tag = self._rank_of[stage + 1], self._tag(stage + 1, microbatch, False)
        with self.record("send_forward", stage, microbatch):
            outputs = self._leaving.pop((stage, microbatch))
            self.transport.send(outputs, peer, tag, (stage + 1, self.kinds[microbatch]))

    def _forward(self, action: Action) -> None:
        stage, microbatch = cell = action.stage, action.microbatch
        if (arriving := self._arriving.pop((Kind.FORWARD, *cell), None)) is not None:
            with self.record("receive_forward", stage, microbatch):
                self._take_inputs(cell, Message(arriving.wait(), arriving.layout))
        inputs = self._inputs.get(cell)
        received = None if inputs is None else Message(inputs, self._layouts.pop(cell))
        with self.record("F", stage, microbatch):
            output = self.boundary.run(stage, received, lambda: self.forward(microbatch))
            if stage == self._last:
                result = self.read(microbatch, output)
                self.results.append(tuple(value.detach() for value in result))
        if stage < self._last:
            result = output.tensors
            self._leaving[cell] = output
            if self._rank_of[stage + 1] == self.rank:
                self._take_inputs((stage + 1, microbatch), self._leaving.pop(cell))
        if torch.is_grad_enabled():
            self._outputs[cell] = tuple(map(detachable, result)) if self.splits_backward else result
        else:
            self._inputs.pop(cell, None)

    def _take_inputs(self, cell: Cell, message: Message) -> None:
        self._layouts[cell] = message.layout
        leaves = tuple(tensor.detach() for tensor in message.tensors)
        self._inputs[cell] = tuple(
            leaf.requires_grad_() if torch.is_grad_enabled() and leaf.is_floating_point() else leaf for leaf in leaves
        )

    # Backward

    @contextmanager
    def _differentiating(self, kind: str, cell: Cell) -> Iterator[None]:
        """Measures a backward; autocast, on while a loop's forward is, would cast what the forward kept in fp32."""
        with self.record(kind, *cell), torch.autocast(self.transport.device.type, enabled=False):
            yield

    def _receive_backward(self, action: Action) -> None:
        stage, microbatch = cell = action.stage, action.microbatch
        shapes = tuple((tuple(output.shape), output.dtype) for output in self._outputs[cell])
        tag = self._tag(stage, microbatch, True)
        arriving = self.transport.receive_shapes(shapes, self._rank_of[stage + 1], tag)
        self._arriving[Kind.BACKWARD, stage, microbatch] = arriving

    def _send_backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        peer, tag = self._rank_of[stage - 1], self._tag(stage - 1, microbatch, True)
        with self.record("send_backward", stage, microbatch):
            gradients = Message(self._gradients.pop((stage - 1, microbatch)))
            self.transport.send(gradients, peer, tag, kind=None)

    def _roots(self, cell: Cell) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns what a backward starts from, with its gradients."""
        stage, microbatch = cell
        if (arriving := self._arriving.pop((Kind.BACKWARD, *cell), None)) is not None:
            with self.record("receive_backward", stage, microbatch):
                self._gradients[cell] = arriving.wait()
        seeds = self.seeds(microbatch) if stage == self._last else self._gradients.pop(cell)
        outputs = self._outputs[cell] if self.keeps_graphs else self._outputs.pop(cell)
        pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
        return [output for output, _ in pairs], [seed for _, seed in pairs]

    def _hand_back(self, cell: Cell, inputs: tuple[Tensor, ...]) -> None:
        gradients = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in inputs)
        self._gradients[cell[0] - 1, cell[1]] = gradients
        for leaf in inputs:
            leaf.grad = None

    def _backward(self, action: Action) -> None:
        cell = action.stage, action.microbatch
        roots, seeds = self._roots(cell)
        self.before_backward(action)
        with self._differentiating("B", cell):
            torch.autograd.backward(roots, seeds, retain_graph=self.keeps_graphs)
        inputs = self._inputs.get(cell) if self.keeps_graphs else self._inputs.pop(cell, None)
        if inputs is not None:
            self._hand_back(cell, inputs)

    def _backward_input(self, action: Action) -> None:
        cell = action.stage, action.microbatch
        if action.stage == 0:
            # Nobody waits for a gradient: everything is left to the second step.
            return
        roots, seeds = self._roots(cell)
        inputs = self._inputs.pop(cell)
        with self._differentiating("I", cell):
            self._groups[cell] = backward_inputs(roots, seeds, inputs, self.parameters[action.stage])
        self._hand_back(cell, inputs)

    def _backward_weight(self, action: Action) -> None:
        cell = action.stage, action.microbatch
        self.before_backward(action)
        roots, seeds = self._roots(cell) if action.stage == 0 else ([], [])
        with self._differentiating("W", cell):
            if action.stage == 0:
                torch.autograd.backward(roots, seeds)
            else:
                backward_weights(self.parameters[action.stage], self._groups.pop(cell))
                self.added(self.parameters[action.stage])

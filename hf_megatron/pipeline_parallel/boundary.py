"""Boundary of a pipeline stage: what enters its first layer, what leaves its last, and proxies for off-stage layers.

Every stage runs the model's own forward, which builds masks, positions and rotary tables. On later stages the modules
before the layers return zeros of the right shape, and layers of earlier stages pass these on; the stage's first layer
gets the hidden states `[batch, sequence, hidden]` that were received. After the stage's last layer an exception leaves
the forward, so that only the last stage reaches the final norm, the head and the loss.

The layers of an encoder and its decoder are one sequence. The first stage embeds the tokens of both: it continues past
the encoder to the decoder's first layer, whose hidden states travel with the encoder's. The stage of the encoder's last
layer runs its final norm, and the decoder's layers of all later stages read the result. If the encoder's output is
given, as in generation, the encoder's stages pass the decoder's hidden states on.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_memory import share_memory
from ..compat.transformers_models import recorded_outputs
from ..core.off_stage import Owner, zeros_for_off_stage
from ..errors import PlanError, UnsupportedError
from .layer_output_proxy import LayerOutputProxy, get_version
from .partition import Stages
from .stage_payload import HIDDEN_STATES, Carried, Message, StageLeft, StagePayload

# Encoder output that every decoder layer reads.
ENCODED = "encoder_hidden_states"
ROUTER_LOGITS = "router_logits"


@dataclass
class StageForward:
    """State of one forward of a stage.

    Attributes:
        stage: index of the stage.
        encodes_alone: whether the encoder is called alone.
        received: hidden states `[batch, sequence, hidden]` of the previous stage.
        payload (`StagePayload`): everything else that was received, or will be sent.
        entered: whether the stage's first layer was reached.
        encodes: whether a layer of the encoder was called.
        decodes: whether the decoder's first layer was called.
        leaving: hidden states that will be sent, while the first stage's forward continues.
        zeros: placeholder for hidden states of other stages, and its version when it was made.
        part: 0, or 1 while a decoder's layers are called.
    """

    stage: int = 0
    encodes_alone: bool = False
    received: Tensor | None = None
    payload: StagePayload = field(default_factory=StagePayload)
    entered: bool = False
    encodes: bool = False
    decodes: bool = False
    leaving: Tensor | None = None
    zeros: Tensor | None = None
    zeros_version: int = 0
    part: int = 0


class StageBoundary(Shared):
    """The forward of a stage that runs on this rank, and the behavior of layers in it.

    Args:
        stages (`Stages`): layers of each stage, and the ranks of the stages.
        carried (`Carried`): what the model's layers pass on besides hidden states.

    Attributes:
        leaving (`Callable`, *optional*): (hidden states that leave a stage, index of its last layer) -> tensor to send.
        is_filled: whether the model's weights are loaded.
        owner (`Owner`, *optional*): engine of the model, after its weights are loaded.
        is_trial: whether the current forward skips all layers.
        is_running: whether a forward is running.
    """

    def __init__(self, stages: Stages, carried: Carried):
        self.stages, self.carried = stages, carried
        self.leaving: Callable[[Tensor, int], Tensor] | None = None
        self.is_filled = self.is_trial = self.is_running = False
        self.owner: Owner | None = None
        self._call = StageForward()
        # Parts (encoder or decoder) whose layer loops read layer outputs by index.
        self._reads_places: set[int] = set()

    @property
    def stage(self) -> int:
        """Index of the stage whose forward is running."""
        return self._call.stage

    def run(
        self, stage: int, received: Message | None, forward: Callable[[], Any], *, encodes_alone: bool = False
    ) -> Any:
        """Runs the model's forward as one stage.

        Args:
            stage (`int`): a stage of this rank.
            received (`Message`, *optional*): output of the previous stage; `None` for the first.
            forward: calls the model's own forward.
            encodes_alone (`bool`): whether it is the encoder's forward, called alone.

        Returns:
            The `Message` to the next stage, or the output of the model or encoder on its last stage.
        """
        call = self._call = StageForward(stage, encodes_alone)
        self.is_running = True
        if received is not None:
            # First tensor: hidden states [batch, sequence, hidden]; the message's layout describes the others.
            call.received, call.payload = received.tensors[0], StagePayload.from_message(received)
        try:
            output = forward()
        except StageLeft as left:
            return left.message
        finally:
            # An embedding may be called outside of a forward: it must not find the state of the last one.
            self._call, self.is_running = StageForward(), False
        if not call.entered or (stage < len(self.stages.ranges) - 1 and not encodes_alone):
            raise PlanError(
                f"Pipeline stage {stage} never executed its first or last layer; some models skip layers when a batch "
                "has no images. Choose another split with pipeline_partition, or use pp_size=1."
            )
        return output

    @contextmanager
    def running_trial(self) -> Iterator[None]:
        """Skips the layers in forwards inside, which then need no other stage."""
        self.is_trial = True
        try:
            yield
        finally:
            self.is_trial = False

    def pass_layer(self, index: int, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls layer `index` if it belongs to the current stage: on received hidden states if it is the first."""
        self.require_running()
        call = self._call
        (start, stop), decoder = self.stages.ranges[call.stage], self.carried.decoder
        call.part = self.carried.part_of(index)
        begins_decoder = 0 < decoder == index
        if begins_decoder:
            # The encoder's placeholder has the encoder's sequence length.
            call.zeros, call.decodes = None, True
            if stop <= decoder:
                self._leave_before_decoder(args, kwargs)
        call.encodes = call.encodes or index < decoder
        # A layer of an earlier stage, of a later stage, or of this one.
        if index < start:
            return self._hand_to_loop(index, start, args, kwargs)
        if index >= stop:
            return self._note_arguments(index, args, kwargs)
        if not call.entered and (index == start or (begins_decoder and not call.encodes)):
            # If the encoder's output is given, the first layer of the stage that is called is the decoder's.
            call.entered = True
            if call.stage > 0 and not begins_decoder:
                self._require_untouched(index, args, kwargs)
            if call.received is not None:
                args, kwargs = self._enter(index, args, kwargs)
        # Arguments that the loop computed on the first stage, such as per-layer inputs.
        for (name, layer), value in call.payload.arguments.items():
            if layer == index:
                args, kwargs = self.carried.replaced(index, name, value, args, kwargs)
        if index in self.carried.kept and not self.is_trial:
            call.payload.keep_input(index, args[0])
        output = self.pass_on(args, kwargs) if self.is_trial else forward(*args, **kwargs)
        if index == stop - 1 and call.stage < len(self.stages.ranges) - 1:
            return self._leave(index, output, args, kwargs)
        return output

    def pass_on(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns a placeholder of zeros `[batch, sequence, hidden]` as a layer's output, the same for all layers.

        It comes with the additional outputs of the previous stage's last layer, if the loop over layers reads them.
        """
        self.require_running()
        call = self._call
        if call.zeros is None:
            zeros = zeros_for_off_stage(args[0] if args else kwargs[HIDDEN_STATES])
            # A trial forward detects how the loop reads outputs, and an encoder's output needs all of its dims.
            is_watched = self.is_trial or (self.carried.decoder > 0 and type(zeros) in (Tensor, LayerOutputProxy))
            call.zeros = zeros.detach().as_subclass(LayerOutputProxy) if is_watched else zeros
            if isinstance(call.zeros, LayerOutputProxy) and self.is_trial:
                call.zeros.unpacked = self._unpack
                call.zeros.reads = None if self.carried.returned[call.part] == 1 else self._read
            call.zeros_version = get_version(call.zeros)
        places = range(1, self.carried.values_of(call.part))
        if not places or (self.is_trial and call.part in self._reads_places):
            return call.zeros
        return (call.zeros, *map(call.payload.values.get, places))

    def _hand_to_loop(self, index: int, start: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the output of an earlier stage's layer: a placeholder, or what was received if the loop reads it."""
        call = self._call
        zeros, kept = self.pass_on(args, kwargs), call.payload.recorded_layers()
        if not self.carried.through_loop:
            return zeros
        if index == 0 and 0 in kept:
            # The loop keeps the embedding's output itself, which no layer returns: it is overwritten in place.
            args[0].detach_().copy_(kept[0])
        if index < start - 1:
            return kept.get(index + 1, zeros)
        call.entered = True
        # The loop may modify it in place.
        return zeros if call.received is None else call.received.clone()

    def _unpack(self) -> tuple | None:
        """Carries all outputs of the layers from now on, if their number is known."""
        call = self._call
        if (returned := self.carried.returned[call.part]) <= 1:
            return None
        self.carry((call.part, place) for place in range(1, returned))
        return self.pass_on((call.zeros,), {})

    def _read(self, place: int) -> Any:
        call = self._call
        self._reads_places.add(call.part)
        self.carry([(call.part, place)])
        return call.payload.values.get(place)

    def is_left_out(self, index: int) -> bool:
        """Returns whether the current stage has no layer of the encoder, or of the decoder, that has layer `index`."""
        (start, stop), decoder = self.stages.ranges[self._call.stage], self.carried.decoder
        return index < decoder <= start or stop <= decoder <= index

    def is_past_layers(self) -> bool:
        """Returns whether the forward has reached this stage's layers; a decoder's embedding follows the encoder."""
        return self._call.entered and (self._call.decodes or not self.carried.decoder)

    def carry(self, places: Iterable[tuple[int, int]]) -> None:
        """Sends the additional layer outputs that the loop over layers reads (see `Carried`) to the next stage."""
        self.carried = replace(self.carried, read=self.carried.read.union(places))

    def _note_arguments(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Keeps the arguments that the first stage's loop passes to later stages' layers; leaves after the last one."""
        call = self._call
        # The first stage continues past the encoder to the decoder's embedding.
        is_on_way = call.stage == 0 and index < self.carried.decoder
        if not is_on_way and (call.stage > 0 or not self.carried.arguments):
            raise PlanError(f"Layer {index} was called outside of its pipeline stage.")
        for name in self.carried.arguments:
            value = self.carried.given(index, name, args, kwargs)
            if isinstance(value, Tensor):
                call.payload.arguments[name, index] = value
        if index == self.stages.ranges[-1][1] - 1:
            self._send_off()
        return self.pass_on(args, kwargs)

    def made_on_first(self, parameters: Container[str], *, is_probe: bool = False) -> dict[str, Any]:
        """Returns layer arguments that the model's forward accepts too, instead of the inputs they are computed from.

        Args:
            parameters: names of the forward's parameters.
            is_probe (`bool`): whether it is a trial forward, in which no layer reads them.
        """
        if is_probe:
            return {name: torch.zeros(()) for name in self.carried.arguments if name in parameters}
        return {name: value for (name, _), value in self._call.payload.arguments.items() if name in parameters}

    def require_running(self) -> None:
        """Raises `UnsupportedError` outside a pipelined forward."""
        if not self.is_running:
            raise UnsupportedError(
                "A module of a pipelined model was called alone, but its layers are on several ranks. Call the model; "
                "without labels it returns logits that you can compute a loss from."
            )

    def _require_untouched(self, index: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises if the loop changed the output of layer `index - 1`, which the previous stage would have missed."""
        call = self._call
        zeros, hidden_states = call.zeros, args[0] if args else kwargs[HIDDEN_STATES]
        assert zeros is not None
        is_same = share_memory(hidden_states, zeros)
        if self.is_trial:
            # A full view is accepted; in later calls the first sample may replace the first entry of a tuple.
            is_same = is_same and hidden_states.shape == zeros.shape and hidden_states.stride() == zeros.stride()
        if not is_same or get_version(zeros) != call.zeros_version:
            raise UnsupportedError(
                f"The model's loop changes hidden states between its layers {index - 1} and {index}, where the "
                "pipeline is split. Choose another split with pipeline_partition, or use pp_size=1."
            )

    def _enter(self, index: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Returns the arguments of the stage's first layer, with the hidden states that were received."""
        call = self._call
        if call.payload.logits:
            # Router logits that the layers of earlier stages would have recorded.
            recorded_outputs()[ROUTER_LOGITS][:0] = call.payload.logits
        for name in self.carried.containers:
            call.payload.fill(name, self.carried.given(index, name, args, kwargs))
        # The placeholder of zeros is replaced by the received [batch, sequence, hidden].
        if args and isinstance(args[0], Tensor):
            return (call.received, *args[1:]), kwargs
        return args, {**kwargs, HIDDEN_STATES: call.received}

    def _leave(self, index: int, output: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leaves the forward after a stage's last layer, or continues if later stages need arguments of the loop."""
        call, decoder = self._call, self.carried.decoder
        if not self.is_trial:
            hidden_states = call.payload.take_values(output, self.carried.get_read_indices(call.part))
            call.leaving = hidden_states if self.leaving is None else self.leaving(hidden_states, index)
            for name in self.carried.containers:
                call.payload.take_entries(name, self.carried.given(index, name, args, kwargs))
            if 0 < decoder <= index and call.encodes:
                self._give_encoded(self.carried.given(index, ENCODED, args, kwargs))
            call.payload.drop_arguments_before(index + 1)
            call.payload.logits = recorded_outputs().get(ROUTER_LOGITS, [])
            if not all(isinstance(logits, Tensor) for logits in call.payload.logits):
                raise UnsupportedError(
                    "output_router_logits=True: a pipeline cannot send router logits that are not tensors. Leave it "
                    "out, or use pp_size=1."
                )
        # The first stage's loop has to reach the later layers to compute their arguments, or the decoder's embedding.
        continues = call.stage == 0 and (self.carried.arguments or index < decoder) and not call.encodes_alone
        if continues or index == decoder - 1:
            return output
        self._send_off()

    def _give_encoded(self, encoded: Tensor) -> None:
        """Passes the encoder's output `[batch, sequence, hidden]` to all layers of the decoder."""
        layers = range(self.carried.decoder, self.stages.ranges[-1][1])
        self._call.payload.arguments.update({(ENCODED, layer): encoded for layer in layers})

    def _leave_before_decoder(self, args: tuple, kwargs: dict[str, Any]) -> NoReturn:
        """Leaves a stage that has encoder layers only when the decoder's first layer is called."""
        call, decoder = self._call, self.carried.decoder
        arguments = call.payload.arguments
        if not self.is_trial:
            embedded: Any = args[0] if args else kwargs[HIDDEN_STATES]
            first: Any = embedded if call.stage == 0 else arguments.pop((HIDDEN_STATES, decoder), call.received)
            if call.entered and self.stages.ranges[call.stage][1] < decoder:
                arguments[HIDDEN_STATES, decoder] = first
            else:
                # The next layer to run is the decoder's first.
                call.leaving, call.payload.values = first, {}
                if call.entered:
                    self._give_encoded(self.carried.given(decoder, ENCODED, args, kwargs))
        self._send_off()

    def _send_off(self) -> NoReturn:
        if self._call.leaving is None:
            # A trial forward sends nothing.
            raise StageLeft(Message(()))
        raise StageLeft(self._call.payload.message(self._call.leaving))

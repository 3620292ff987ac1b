"""Where a stack of layers is cut: what enters a stage's first layer, what leaves its last, what stands for the rest.

The forward of the model stays untouched on every stage: it builds masks, positions and rotary tables. On later stages
the modules before the layers return zeros of the right shape, layers of other stages pass them on, and the stage's
first layer gets what the stage before sent. Behind a stage's last layer the forward is left, so that only the last
stage reaches the final norm, the head and the loss.

An encoder's layers and its decoder's are one row. The first stage embeds the tokens of both: it goes on, past the
encoder, to the decoder's first layer, whose hidden states travel beside the encoder's. The stage with the encoder's
last layer goes on through its final norm, and the decoder's layers of all stages behind read what came of that. Where
the encoder's output is given, as in generation, stages of its layers pass the decoder's hidden states on.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_memory import share_memory
from ..compat.transformers_models import recorded_outputs
from ..core.off_stage import Owner, zeros_for_off_stage
from ..errors import PlanError, UnsupportedError
from .layer_output_proxy import LayerOutputProxy, version_of
from .partition import Stages
from .stage_payload import HIDDEN_STATES, Carried, Message, StageLeft, StagePayload

# What an encoder made, which every layer of its decoder reads.
ENCODED = "encoder_hidden_states"
ROUTER_LOGITS = "router_logits"


class StageBoundary(Shared):
    """The stage whose forward is under way on this rank, and how layers behave in it.

    Attributes:
        leaving (`Callable`, *optional*): (hidden states that leave a stage, the number of its last layer) -> what is
            sent.
        stage: the one whose forward is under way.
        is_filled: whether the model's weights are loaded.
        owner (`Owner`, *optional*): knows this rank's parameters, once they are loaded.
        is_trial: whether the forward under way leaves out all layers.
        is_running: whether a forward is under way.
    """

    def __init__(self, stages: Stages, carried: Carried):
        self.stages, self.carried = stages, carried
        self.leaving: Callable[[Tensor, int], Tensor] | None = None
        self.entered = self.is_filled = self.is_trial = self.is_running = False
        self.owner: Owner | None = None
        self.stage = 0
        # Hidden states that entered, or are about to leave while the first stage's loop goes on.
        self._received: Tensor | None = None
        self._leaving: Tensor | None = None
        self._zeros: Tensor | None = None
        self._crossings = StagePayload()
        # Of the forward under way: which layers were called.
        self._encodes = self._decodes = self._encodes_alone = False
        # 1 while a decoder's layers behind an encoder are called; whose loops read values by their places.
        self._part, self._reads_places = 0, set[int]()

    def run(
        self, stage: int, received: Message | None, forward: Callable[[], Any], *, encodes_alone: bool = False
    ) -> Any:
        """Runs the model's forward as one stage.

        Args:
            stage (`int`): a stage of this rank.
            received (`Message`, *optional*): what the stage before returned; `None` for the first.
            forward: calls the model's own forward.
            encodes_alone (`bool`): it is the encoder's, of which this stage has layers.

        Returns:
            The `Message` to the next stage, or, from the last stage of the model or encoder, what that returned.
        """
        self.stage, self.is_running = stage, True
        self.entered = self._encodes = self._decodes = False
        self._encodes_alone = encodes_alone
        if received is not None:
            self._received, self._crossings = received.tensors[0], StagePayload.of_message(received)
        try:
            output = forward()
        except StageLeft as left:
            return left.message
        finally:
            self._received = self._leaving = self._zeros = None
            self._crossings, self.is_running = StagePayload(), False
            # Outside of a forward an embedding may be asked for by itself.
            entered, self.entered, self.stage = self.entered, False, 0
        if not entered or (stage < len(self.stages.ranges) - 1 and not encodes_alone):
            raise PlanError(
                "A pipeline stage ran through the model without meeting its first or its last layer, which the model's "
                "loop may leave out in some calls: those that read images, where there are none. Set "
                "pipeline_partition to cut beside others, or load the model with pp_size=1."
            )
        return output

    @contextmanager
    def running_trial(self) -> Iterator[None]:
        """Leaves out the layers in forwards inside, which need no other stage then."""
        self.is_trial = True
        try:
            yield
        finally:
            self.is_trial = False

    def pass_layer(self, index: int, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls layer `index` as the present stage has to: not at all, on what was received, or as the last."""
        self.require_running()
        (start, stop), decoder = self.stages.ranges[self.stage], self.carried.decoder
        self._part = self.carried.part_of(index)
        begins_decoder = 0 < decoder == index
        if begins_decoder:
            # Those of the encoder have its length.
            self._zeros, self._decodes = None, True
            if stop <= decoder:
                self._leave_before_decoder(args, kwargs)
        self._encodes = self._encodes or index < decoder
        if index < start:
            return self._hand_to_loop(index, start, args, kwargs)
        if index >= stop:
            return self._note_arguments(index, args, kwargs)
        if not self.entered and (index == start or (begins_decoder and not self._encodes)):
            # With the encoder's output given, the first of the stage's layers that is called is the decoder's.
            self.entered = True
            if self.stage > 0 and not begins_decoder:
                self._require_untouched(index, args, kwargs)
            if self._received is not None:
                args, kwargs = self._enter(index, args, kwargs)
        for (name, layer), value in self._crossings.arguments.items():
            if layer == index:
                args, kwargs = self.carried.replaced(index, name, value, args, kwargs)
        if index in self.carried.kept and not self.is_trial:
            self._crossings.keep_input(index, args[0])
        output = self.pass_on(args, kwargs) if self.is_trial else call(*args, **kwargs)
        if index == stop - 1 and self.stage < len(self.stages.ranges) - 1:
            return self._leave(index, output, args, kwargs)
        return output

    def pass_on(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the same zeros `[batch, sequence, hidden]`, for a caller of them or of their first entry.

        Behind them comes what the last layer of the stage before returned besides hidden states.
        """
        self.require_running()
        if self._zeros is None:
            zeros = zeros_for_off_stage(args[0] if args else kwargs[HIDDEN_STATES])
            # What an encoder returns has to have all of its dims.
            knows_entries = self.is_trial or (self.carried.decoder > 0 and type(zeros) in (Tensor, LayerOutputProxy))
            self._zeros = zeros.detach().as_subclass(LayerOutputProxy) if knows_entries else zeros
            if isinstance(self._zeros, LayerOutputProxy) and self.is_trial:
                self._zeros.unpacked = self._unpack
                self._zeros.reads = None if self.carried.returned[self._part] == 1 else self._read
            self._version = version_of(self._zeros)
        places = range(1, self.carried.values_of(self._part))
        if not places or (self.is_trial and self._part in self._reads_places):
            return self._zeros
        return (self._zeros, *map(self._crossings.values.get, places))

    def _hand_to_loop(self, index: int, start: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns zeros for what an earlier stage's layer returned, or that where this stage's loop reads it."""
        zeros, kept = self.pass_on(args, kwargs), self._crossings.recorded_layers()
        if not self.carried.through_loop:
            return zeros
        if index == 0 and 0 in kept:
            args[0].detach_().copy_(kept[0])  # No layer returns what the loop has of the embedding.
        if index < start - 1:
            return kept.get(index + 1, zeros)
        self.entered = True
        # Loops work on it in place.
        return zeros if self._received is None else self._received.clone()

    def _unpack(self) -> tuple | None:
        """Carries all that layers return from now on, if they say how many values that are."""
        if (returned := self.carried.returned[self._part]) <= 1:
            return None
        self.carry((self._part, place) for place in range(1, returned))
        return self.pass_on((self._zeros,), {})

    def _read(self, place: int) -> Any:
        self._reads_places.add(self._part)
        self.carry([(self._part, place)])
        return self._crossings.values.get(place)

    def is_left_out(self, index: int) -> bool:
        """Tells whether the present stage has no part of the list of layer `index`: the encoder's, or the decoder's."""
        (start, stop), decoder = self.stages.ranges[self.stage], self.carried.decoder
        return index < decoder <= start or stop <= decoder <= index

    def is_past_layers(self) -> bool:
        """Tells whether the forward has come to layers of this stage; a decoder's embedding runs behind an encoder."""
        return self.entered and (self._decodes or not self.carried.decoder)

    def carry(self, places: Iterable[tuple[int, int]]) -> None:
        """Has what layers return behind hidden states cross, those at the places that the loop reads, as `Carried`."""
        self.carried = replace(self.carried, read=self.carried.read.union(places))

    def _note_arguments(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Keeps what the loop of the first stage gives a later stage's layer, and leaves behind the last of them."""
        is_on_way = self.stage == 0 and index < self.carried.decoder  # To the decoder's embedding.
        if not is_on_way and (self.stage > 0 or not self.carried.arguments):
            raise PlanError(f"Layer {index} was called outside of its pipeline stage.")
        for name in self.carried.arguments:
            value = self.carried.given(index, name, args, kwargs)
            if isinstance(value, Tensor):
                self._crossings.arguments[name, index] = value
        if index == self.stages.ranges[-1][1] - 1:
            self._send_off()
        return self.pass_on(args, kwargs)

    def made_on_first(self, parameters: Container[str], *, is_probe: bool = False) -> dict[str, Any]:
        """Returns the arguments of layers that the model's forward takes too, in place of what they are made of.

        Args:
            parameters: names of the forward's.
            is_probe (`bool`): for a trial_forward, in which no layer reads them.
        """
        if is_probe:
            return {name: torch.zeros(()) for name in self.carried.arguments if name in parameters}
        return {name: value for (name, _), value in self._crossings.arguments.items() if name in parameters}

    def require_running(self) -> None:
        """Raises `UnsupportedError` outside of a pipelined forward."""
        if not self.is_running:
            raise UnsupportedError(
                "A part of a pipelined model was called by itself: its layers lie on several ranks. Call the whole "
                "model; without labels it returns logits that a loss of your own can be computed from."
            )

    def _require_untouched(self, index: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises where the loop did something to what layer `index - 1` returned, which the stage before left out."""
        zeros, found = self._zeros, args[0] if args else kwargs[HIDDEN_STATES]
        assert zeros is not None
        is_same = share_memory(found, zeros)
        if self.is_trial:
            # A view of all of it is it; later, the first row may stand for a tuple's first entry.
            is_same = is_same and found.shape == zeros.shape and found.stride() == zeros.stride()
        if not is_same or version_of(zeros) != self._version:
            raise UnsupportedError(
                f"The model's loop changes hidden states between its layers {index - 1} and {index}, where the "
                "pipeline is cut. Cut elsewhere with pipeline_partition, or load it with pp_size=1."
            )

    def _enter(self, index: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._crossings.logits:
            # What the layers of earlier stages would have recorded.
            recorded_outputs()[ROUTER_LOGITS][:0] = self._crossings.logits
        for name in self.carried.containers:
            self._crossings.fill(name, self.carried.given(index, name, args, kwargs))
        if args and isinstance(args[0], Tensor):
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, HIDDEN_STATES: self._received}

    def _leave(self, index: int, output: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leaves the forward behind a stage's last layer, or goes on for what layers of later stages are given."""
        decoder = self.carried.decoder
        if not self.is_trial:
            hidden_states = self._crossings.take_values(output, self.carried.read_of(self._part))
            self._leaving = hidden_states if self.leaving is None else self.leaving(hidden_states, index)
            for name in self.carried.containers:
                self._crossings.take_entries(name, self.carried.given(index, name, args, kwargs))
            if 0 < decoder <= index and self._encodes:
                self._give_encoded(self.carried.given(index, ENCODED, args, kwargs))
            self._crossings.drop_arguments_before(index + 1)
            self._crossings.logits = recorded_outputs().get(ROUTER_LOGITS, [])
            if not all(isinstance(logits, Tensor) for logits in self._crossings.logits):
                raise UnsupportedError(
                    "output_router_logits: these router logits are no tensors; a pipeline cannot send them."
                )
        goes_on = self.stage == 0 and (self.carried.arguments or index < decoder) and not self._encodes_alone
        if goes_on or index == decoder - 1:
            return output
        self._send_off()

    def _give_encoded(self, encoded: Tensor) -> None:
        """Has every layer of the decoder read the encoder's output, `[batch, sequence, hidden]`."""
        layers = range(self.carried.decoder, self.stages.ranges[-1][1])
        self._crossings.arguments.update({(ENCODED, layer): encoded for layer in layers})

    def _leave_before_decoder(self, args: tuple, kwargs: dict[str, Any]) -> NoReturn:
        """Leaves a stage of encoder layers alone where the decoder's first layer is called."""
        decoder, arguments = self.carried.decoder, self._crossings.arguments
        if not self.is_trial:
            own: Any = args[0] if args else kwargs[HIDDEN_STATES]
            first: Any = own if self.stage == 0 else arguments.pop((HIDDEN_STATES, decoder), self._received)
            if self.entered and self.stages.ranges[self.stage][1] < decoder:
                arguments[HIDDEN_STATES, decoder] = first
            else:
                # The next layer to run is the decoder's first.
                self._leaving, self._crossings.values = first, {}
                if self.entered:
                    self._give_encoded(self.carried.given(decoder, ENCODED, args, kwargs))
        self._send_off()

    def _send_off(self) -> NoReturn:
        if self._leaving is None:
            raise StageLeft(Message(()))
        raise StageLeft(self._crossings.message(self._leaving))

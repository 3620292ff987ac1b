"""Stage payload: tensors that are sent to the next stage in addition to hidden states, and the message format.

There are three kinds; the family's spec names the last two:

- additional outputs of a stage's last layer, such as token indices that later layers read;
- arguments of later layers that the loop computes on the first stage, such as per-layer inputs of each token;
- entries that layers put into containers for later layers, such as shared keys and values.

Each tensor is sent once, and passed on by the stages in between.
"""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import UnsupportedError
from ..models.spec import ModelSpec

# Name of the container of layer inputs that the loop itself keeps for later layers.
_KEPT = "kept by the loop"
# First argument of a layer.
HIDDEN_STATES = "hidden_states"
_LOGITS, _VALUE, _ARGUMENT, _CONTAINER = "router_logits", "value", "argument", "container"


class StageLeft(Exception):
    """Leaves a model's forward after the last layer of a stage that is not the last one."""

    def __init__(self, message: "Message"):
        super().__init__("after the last layer of a pipeline stage")
        self.message = message


@dataclass(frozen=True)
class Message:
    """Message from a stage to the next one.

    Args:
        tensors: hidden states `[batch of the microbatch, local, hidden]`, then the payload's tensors of any shape;
            `local` is the sequence / cp, further divided by tp with sequence parallelism.
        layout (`str`): JSON list with the meanings of each tensor after the first; empty if all are router logits.
    """

    tensors: tuple[Tensor, ...]
    layout: str = ""


def _values_returned(cls: type) -> int:
    """Returns the number of outputs of a layer class, read from the tuples in its `return` statements.

    0 means a tuple of unknown length, 1 no tuple or different numbers.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        # Classes that were defined interactively have no source file.
        return 1
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    counts = {len(value.elts) if isinstance(value, ast.Tuple) else int(not _is_sum(value)) for value in returned}
    return counts.pop() if len(counts) == 1 else 1


def _is_sum(value: ast.expr | None) -> bool:
    """Returns whether an expression concatenates tuples."""
    return isinstance(value, ast.BinOp) and any(isinstance(part, ast.Tuple) for part in (value.left, value.right))


@dataclass(frozen=True)
class Carried:
    """Values that a model's layers pass on in addition to hidden states.

    In an encoder-decoder, part 0 is the encoder and part 1 the decoder; other models have part 0 only.

    Args:
        read (`frozenset[tuple[int, int]]`): (part, index of an additional layer output that the loop reads).
        arguments (`tuple[str, ...]`): layer arguments that the loop computes on the first stage.
        containers (`tuple[str, ...]`): layer arguments that are containers which layers fill.
        parameters: argument names of each layer, in order.
        returned (`tuple[int, ...]`): number of outputs of the layers of each part, sent if the loop unpacks them; 0 for
            a tuple of unknown length that the loop may read by index.
        decoder (`int`): index of the decoder's first layer in an encoder-decoder, otherwise 0.
        through_loop (`bool`): whether the loop modifies hidden states between layers: the received ones then pass
            through the loop before the stage's first layer.
        kept (`frozenset[int]`): layers whose input the loop keeps for all later ones.
    """

    read: frozenset[tuple[int, int]] = frozenset()
    arguments: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    parameters: tuple[tuple[str, ...], ...] = ()
    returned: tuple[int, ...] = (1,)
    decoder: int = 0
    through_loop: bool = False
    kept: frozenset[int] = frozenset()

    def part_of(self, layer: int) -> int:
        """Returns the part of a layer: 1 for the decoder of an encoder-decoder, otherwise 0."""
        return int(0 < self.decoder <= layer)

    def get_read_indices(self, part: int) -> frozenset[int]:
        """Returns the indices of the additional outputs that the loop over a part's layers reads."""
        return frozenset(place for of, place in self.read if of == part)

    def values_of(self, part: int) -> int:
        """Returns the number of outputs of an off-stage layer, including hidden states."""
        return max(self.get_read_indices(part), default=0) + 1

    @classmethod
    def of(cls, spec: ModelSpec, layers: Iterable[nn.Module], decoder: int = 0) -> "Carried":
        """Returns the carried values of a model from its spec and layers; `decoder` as for the class."""
        layers = list(layers)
        parts = (layers[:decoder], layers[decoder:]) if decoder else (layers,)
        counts = [{_values_returned(type(layer)) for layer in part} for part in parts]
        returned = tuple(numbers.pop() if len(numbers) == 1 else 1 for numbers in counts)
        if (
            spec.pp.layer_num_outputs == 1
            and not spec.pp.pre_layer_arguments
            and not spec.pp.mutable_layer_arguments
            and not decoder
        ):
            through_loop = bool(spec.pp.sublayer_lists or spec.pp.recorded_layers)
            return cls(returned=returned, through_loop=through_loop, kept=frozenset(spec.pp.recorded_layers))
        parameters = tuple(tuple(inspect.signature(type(layer).forward).parameters)[1:] for layer in layers)
        read = frozenset((part, place) for part in range(len(parts)) for place in range(1, spec.pp.layer_num_outputs))
        return cls(read, spec.pp.pre_layer_arguments, spec.pp.mutable_layer_arguments, parameters, returned, decoder)

    def given(self, layer: int, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns an argument of a layer's call, passed by position or keyword; `None` if it is missing."""
        if name not in self.parameters[layer]:
            # Only the encoder's or only the decoder's layers take it.
            return None
        place = self.parameters[layer].index(name)
        return args[place] if place < len(args) else kwargs.get(name)

    def replaced(
        self, layer: int, name: str, value: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Returns a layer's arguments with one replaced."""
        # Hidden states come first; some layers use another name for them.
        place = 0 if name == HIDDEN_STATES else self.parameters[layer].index(name)
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, self.parameters[layer][place]: value}


@dataclass
class StagePayload:
    """Payload of one forward.

    Attributes:
        logits: router logits of earlier stages' layers.
        values: index -> additional output of the previous stage's last layer, a tensor or tuple of tensors.
        arguments: (name, layer) -> tensor of any shape.
        entries: (container, key) -> tensor, or tuple of tensors, of any shape.
    """

    logits: list[Tensor] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    arguments: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    entries: dict[tuple[str, Any], Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Message) -> "StagePayload":
        """Returns the payload of a received message."""
        payload, others = cls(), message.tensors[1:]
        if not message.layout:
            payload.logits = list(others)
            return payload
        parts: dict[tuple[str, Any], dict[int, Tensor]] = {}
        of_values: dict[int, dict[int, Tensor]] = {}
        # A tensor has several places if the sending stage used the same one for several values.
        for tensor, places in zip(others, json.loads(message.layout), strict=True):
            for kind, *place in places:
                if kind == _LOGITS:
                    payload.logits.append(tensor)
                elif kind == _VALUE and place[1] is None:
                    payload.values[place[0]] = tensor
                elif kind == _VALUE:
                    of_values.setdefault(place[0], {})[place[1]] = tensor
                elif kind == _ARGUMENT:
                    payload.arguments[place[0], place[1]] = tensor
                else:
                    name, key, position = place
                    if position is None:
                        payload.entries[name, key] = tensor
                    else:
                        parts.setdefault((name, key), {})[position] = tensor
        payload.entries |= {owner: _in_order(numbered) for owner, numbered in parts.items()}
        payload.values |= {index: _in_order(numbered) for index, numbered in of_values.items()}
        return payload

    def message(self, hidden_states: Tensor) -> Message:
        """Returns the message with hidden states `[batch, local, hidden]` and the payload; each tensor once."""
        places: list[tuple[Tensor, list[Any]]] = [(logits, [_LOGITS]) for logits in self.logits]
        places += [
            (part, [_VALUE, index, position])
            for index, value in self.values.items()
            for position, part in _parts(value)
        ]
        places += [(value, [_ARGUMENT, *place]) for place, value in self.arguments.items()]
        for (name, key), entry in self.entries.items():
            places += [(part, [_CONTAINER, name, key, position]) for position, part in _parts(entry)]
        if len(places) == len(self.logits):
            return Message((hidden_states, *self.logits))
        # Grouped by identity: a tensor that has several places is sent once.
        layout: dict[int, tuple[Tensor, list[Any]]] = {}
        for tensor, place in places:
            layout.setdefault(id(tensor), (tensor, []))[1].append(place)
        tensors = [tensor for tensor, _ in layout.values()]
        return Message((hidden_states, *tensors), json.dumps([meanings for _, meanings in layout.values()]))

    def take_values(self, output: Any, read: AbstractSet[int]) -> Tensor:
        """Stores a layer's additional outputs; returns its hidden states `[batch, sequence, hidden]`.

        Args:
            read: indices of the additional outputs to store.
        """
        if not isinstance(output, tuple | list):
            return output
        self.values = {}
        for index, value in enumerate(output):
            if index not in read:
                continue
            if isinstance(value, Tensor) or (
                isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value)
            ):
                self.values[index] = value
            elif value is not None:
                raise UnsupportedError(
                    f"A layer returned a {type(value).__name__} as output {index}: a pipeline sends only tensors and "
                    "tuples of tensors. Load the model with pp_size=1."
                )
        return output[0]

    def take_entries(self, name: str, container: Any) -> None:
        """Stores the entries that layers have put into a container, if there is one."""
        for key, entry in (container or {}).items():
            parts = (entry,) if isinstance(entry, Tensor) else entry
            if not isinstance(key, str | int) or not all(isinstance(part, Tensor) for part in parts):
                raise UnsupportedError(
                    f"{name} holds {key!r}: {type(entry).__name__}; a pipeline sends only tensors and tuples of "
                    "tensors, with strings or integers as keys. Load the model with pp_size=1."
                )
            self.entries[name, key] = entry

    def fill(self, name: str, container: Any) -> None:
        """Fills this stage's container with the entries of earlier stages' layers."""
        for (owner, key), entry in self.entries.items():
            if owner == name:
                container[key] = entry

    def keep_input(self, layer: int, hidden_states: Tensor) -> None:
        """Stores the input of a layer, `[batch, sequence, hidden]`, for the loops of later stages."""
        self.entries[_KEPT, layer] = hidden_states

    def recorded_layers(self) -> dict[int, Tensor]:
        """Returns layer index -> layer input that earlier stages stored."""
        return {key: entry for (owner, key), entry in self.entries.items() if owner == _KEPT}

    def drop_arguments_before(self, layer: int) -> None:
        """Removes the arguments of layers before this one."""
        self.arguments = {place: value for place, value in self.arguments.items() if place[1] >= layer}


def _parts(value: Any) -> list[tuple[int | None, Tensor]]:
    """Returns the tensors of a tuple with their indices; a single tensor has the index `None`."""
    return [(None, value)] if isinstance(value, Tensor) else [*enumerate(value)]


def _in_order(numbered: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    return tuple(numbered[position] for position in sorted(numbered))

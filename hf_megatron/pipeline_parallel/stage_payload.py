"""What crosses the boundary of a stage beside hidden states, and how a message says so.

Three kinds, of which a family's spec names the last two: what the last layer of a stage returned besides hidden states
(token indices that later layers read), arguments of later layers that the loop makes on the first stage (an input per
layer of each token), and what layers put into containers that later layers read (shared keys and values). Each tensor
is sent once, and passed on by stages that only lie between.
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

# What a loop keeps for later layers is a container of no layer's.
_KEPT = "kept by the loop"
# A layer's first argument.
HIDDEN_STATES = "hidden_states"
_LOGITS, _VALUE, _ARGUMENT, _CONTAINER = "router_logits", "value", "argument", "container"


class StageLeft(Exception):
    """Unwinds a model's forward behind the last layer of a stage that is not the last."""

    def __init__(self, message: "Message"):
        super().__init__("behind the last layer of a pipeline stage")
        self.message = message


@dataclass(frozen=True)
class Message:
    """What leaves a stage.

    Args:
        tensors: hidden states `[batch, sequence, hidden]`, and others of any shape.
        layout (`str`): JSON that says of each tensor behind the first what it is; empty for router logits alone.
    """

    tensors: tuple[Tensor, ...]
    layout: str = ""


def _values_returned(cls: type) -> int:
    """Counts the values that a layer returns, where each of its returns spells out a tuple of as many.

    0 stands for a tuple of some number, 1 for no tuple.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError):
        # Made in a session, without a file.
        return 1
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    counts = {len(value.elts) if isinstance(value, ast.Tuple) else int(not _is_sum(value)) for value in returned}
    return counts.pop() if len(counts) == 1 else 1


def _is_sum(value: ast.expr | None) -> bool:
    """Tells whether a tuple is put together of others."""
    return isinstance(value, ast.BinOp) and any(isinstance(part, ast.Tuple) for part in (value.left, value.right))


@dataclass(frozen=True)
class Carried:
    """What a model's layers hand on beside hidden states.

    Args:
        read (`frozenset[tuple[int, int]]`): 0, or 1 for layers of a decoder behind an encoder, and the place of a value
            that a layer returns behind hidden states, and its loop reads.
        arguments (`tuple[str, ...]`): of layers, made by the loop on the first stage.
        containers (`tuple[str, ...]`): arguments of layers that layers fill.
        parameters: names of each layer's arguments, in their order.
        returned (`tuple[int, ...]`): values that each layer spells out where it returns, carried once a loop unpacks
            them, and those of a decoder's layers behind an encoder; 0 for a tuple of some number, of which a loop reads
            some by their places.
        decoder (`int`): the first layer of a decoder behind an encoder, 0 without an encoder.
        through_loop (`bool`): the loop works on hidden states between layers: a stage's first layer gets what it makes
            of what the stage before sent.
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
        """Returns 1 for a layer of a decoder behind an encoder, 0 for others."""
        return int(0 < self.decoder <= layer)

    def get_read_indices(self, part: int) -> frozenset[int]:
        """Returns the places of the values that the loop over a part's layers reads behind hidden states."""
        return frozenset(place for of, place in self.read if of == part)

    def values_of(self, part: int) -> int:
        """Counts the values that stand for what a layer of another stage returns, hidden states among them."""
        return max(self.get_read_indices(part), default=0) + 1

    @classmethod
    def of(cls, spec: ModelSpec, layers: Iterable[nn.Module], decoder: int = 0) -> "Carried":
        """Reads a spec, of a model with these layers; `decoder` as for the class."""
        layers = list(layers)
        parts = (layers[:decoder], layers[decoder:]) if decoder else (layers,)
        counts = [{_values_returned(type(layer)) for layer in part} for part in parts]
        returned = tuple(found.pop() if len(found) == 1 else 1 for found in counts)
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
        """Returns an argument of a layer's call, by whichever way it was passed; `None` without it."""
        if name not in self.parameters[layer]:
            # Of the layers of an encoder or of its decoder alone.
            return None
        place = self.parameters[layer].index(name)
        return args[place] if place < len(args) else kwargs.get(name)

    def replaced(
        self, layer: int, name: str, value: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Returns a layer's arguments with one replaced."""
        # Some call hidden states otherwise.
        place = 0 if name == HIDDEN_STATES else self.parameters[layer].index(name)
        if place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, self.parameters[layer][place]: value}


@dataclass
class StagePayload:
    """What one forward has of it.

    Attributes:
        logits: what routers of earlier stages recorded.
        values: what the last layer of the stage before returned besides hidden states, tensors or tuples of them.
        arguments: (name, layer) -> tensor of any shape.
        entries: (container, key) -> tensor, or tuple of tensors, of any shape.
    """

    logits: list[Tensor] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    arguments: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    entries: dict[tuple[str, Any], Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: Message) -> "StagePayload":
        """Sorts a message's tensors."""
        found, others = cls(), message.tensors[1:]
        if not message.layout:
            found.logits = list(others)
            return found
        parts: dict[tuple[str, Any], dict[int, Tensor]] = {}
        of_values: dict[int, dict[int, Tensor]] = {}
        for tensor, places in zip(others, json.loads(message.layout), strict=True):
            for kind, *place in places:
                if kind == _LOGITS:
                    found.logits.append(tensor)
                elif kind == _VALUE and place[1] is None:
                    found.values[place[0]] = tensor
                elif kind == _VALUE:
                    of_values.setdefault(place[0], {})[place[1]] = tensor
                elif kind == _ARGUMENT:
                    found.arguments[place[0], place[1]] = tensor
                else:
                    name, key, position = place
                    if position is None:
                        found.entries[name, key] = tensor
                    else:
                        parts.setdefault((name, key), {})[position] = tensor
        found.entries |= {owner: _in_order(numbered) for owner, numbered in parts.items()}
        found.values |= {index: _in_order(numbered) for index, numbered in of_values.items()}
        return found

    def message(self, hidden_states: Tensor) -> Message:
        """Makes a message of `[batch, sequence, hidden]` and all of this; one tensor in several places goes once."""
        places: list[tuple[Tensor, list[Any]]] = [(logits, [_LOGITS]) for logits in self.logits]
        places += [
            (part, [_VALUE, index, number]) for index, value in self.values.items() for number, part in _parts(value)
        ]
        places += [(value, [_ARGUMENT, *place]) for place, value in self.arguments.items()]
        for (name, key), entry in self.entries.items():
            places += [(part, [_CONTAINER, name, key, number]) for number, part in _parts(entry)]
        if len(places) == len(self.logits):
            return Message((hidden_states, *self.logits))
        layout: dict[int, tuple[Tensor, list[Any]]] = {}
        for tensor, place in places:
            layout.setdefault(id(tensor), (tensor, []))[1].append(place)
        tensors = [tensor for tensor, _ in layout.values()]
        return Message((hidden_states, *tensors), json.dumps([found for _, found in layout.values()]))

    def take_values(self, output: Any, read: AbstractSet[int]) -> Tensor:
        """Keeps what a layer returned besides hidden states `[batch, sequence, hidden]`; returns those."""
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
                    f"A layer returned a {type(value).__name__} as value {index}: a pipeline sends tensors and "
                    "tuples of them on. Load the model with pp_size=1."
                )
        return output[0]

    def take_entries(self, name: str, container: Any) -> None:
        """Keeps what layers have put into a container, if there is one."""
        for key, entry in (container or {}).items():
            parts = (entry,) if isinstance(entry, Tensor) else entry
            if not isinstance(key, str | int) or not all(isinstance(part, Tensor) for part in parts):
                raise UnsupportedError(
                    f"{name} holds {key!r}: {type(entry).__name__}; a pipeline sends tensors and tuples of them, by "
                    "names and numbers. Load the model with pp_size=1."
                )
            self.entries[name, key] = entry

    def fill(self, name: str, container: Any) -> None:
        """Puts what earlier stages' layers have put into a container into this stage's."""
        for (owner, key), entry in self.entries.items():
            if owner == name:
                container[key] = entry

    def keep_input(self, layer: int, hidden_states: Tensor) -> None:
        """Keeps the input of a layer, `[batch, sequence, hidden]`, for the loops of later stages."""
        self.entries[_KEPT, layer] = hidden_states

    def recorded_layers(self) -> dict[int, Tensor]:
        """Returns what loops of earlier stages kept, by the layer that it is the input of."""
        return {key: entry for (owner, key), entry in self.entries.items() if owner == _KEPT}

    def drop_arguments_before(self, layer: int) -> None:
        """Forgets what no layer from this one on is given."""
        self.arguments = {place: value for place, value in self.arguments.items() if place[1] >= layer}


def _parts(value: Any) -> list[tuple[int | None, Tensor]]:
    """Numbers the tensors of a tuple; a tensor alone has no number."""
    return [(None, value)] if isinstance(value, Tensor) else [*enumerate(value)]


def _in_order(numbered: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
    return tuple(numbered[number] for number in sorted(numbered))

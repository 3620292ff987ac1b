"""The model that a checkpoint belongs to: which tensors it has in memory, and under which names its files have them."""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.meta_model import meta_model, meta_model_of
from ..checkpoint.untrusted_config import CONFIG, settings
from ..compat.transformers_loading import untied_state_dict
from ..core.io.safetensors import MOST_TENSORS, TensorMeta
from ..core.text import safe_repr
from ..errors import CheckpointError
from .interfaces import WEIGHT, Key

# What a store may have for a weight, or for one expert's part of it: an optimizer's tensors and settings, in halves;
# and what it may have besides: random states, layers that are left out.
_STORED_PER_WEIGHT, _STORED_BESIDES = 32, 10_000
_QUANTIZATIONS = ("quantization_config", "compression_config")


class OwnWeights(CheckpointError):
    """A checkpoint has weights of their own where the class ties them, which transformers then does not tie.

    Args:
        names: the second names, of `state_dict()`, under which the class has the tied ones.
    """

    def __init__(self, where: str, names: Iterable[str]):
        self.names = tuple(names)
        super().__init__(f"{where}: {', '.join(self.names)} are tied by the model, and weights of their own.")


def untie(model: Any, names: Iterable[str]) -> None:
    """Gives weights of a model, of any shapes, that it ties under these names parameters of their own."""
    for name in names:
        module, _, weight = name.rpartition(".")
        owner = model.get_submodule(module)
        owner.register_parameter(weight, torch.nn.Parameter(getattr(owner, weight).detach().clone()))


class Architecture:
    """A model class of transformers with a config, without weights.

    Args:
        model: an instance on the meta device.

    Attributes:
        names: its parameters and persistent buffers in the order of its modules, a tied one under its first name.
        num_mtp_layers: layers of multi-token prediction among its layers, behind those that the class has.
        untied: weights of their own here that the class ties.
    """

    def __init__(self, model: Any, num_mtp_layers: int = 0, untied: tuple[str, ...] = ()):
        self.model, self.num_mtp_layers, self.untied = model, num_mtp_layers, untied
        self.config = model.config
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        self._first = {
            name: first.setdefault(id(parameters.get(name, tensor)), name)
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        self.names = tuple(dict.fromkeys(self._first.values()))

    @classmethod
    def from_class(cls, model_class: Any, config: Any) -> "Architecture":
        """Makes it of a class of transformers with a config."""
        return cls(meta_model(model_class, config))

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> "Architecture":
        """Makes it of the config.json in a folder.

        Raises:
            CheckpointError: there is none, it names no class of transformers, or says that weights are quantized.
        """
        made = cls(meta_model_of(path))
        for name, value in settings(made.config.to_dict()):
            if name.endswith(_QUANTIZATIONS) and value:
                method = value.get("quant_method") if isinstance(value, dict) else value
                raise CheckpointError(
                    f"{Path(path) / CONFIG}: {safe_repr(name)} has quant_method {safe_repr(method)}: quantized "
                    f"weights are not "
                    "converted. Dequantize them first; where they are plain, delete it from the config."
                )
        return made

    def include_mtp(self, layers: Sequence[Any]) -> "Architecture":
        """Makes it with these layers of multi-token prediction behind its own."""
        model = copy.deepcopy(self.model)
        model.get_decoder().layers.extend(layers)
        return Architecture(model, len(layers), self.untied)

    def with_own_weights(self, names: Iterable[str]) -> "Architecture":
        """Makes it with weights of their own under these names, which the class ties."""
        model, names = copy.deepcopy(self.model), tuple(names)
        untie(model, names)
        return Architecture(model, self.num_mtp_layers, (*self.untied, *names))

    @cached_property
    def ties_always(self) -> bool:
        """Whether no config can say that the head is a weight of its own, which T5's files then show."""
        if not getattr(self.config, "tie_word_embeddings", False) or self.untied:
            return False
        asked = type(self.config).from_dict({**self.config.to_dict(), "tie_word_embeddings": False})
        return bool(asked.tie_word_embeddings)

    def first_name(self, name: str) -> str:
        """Returns the name under which a weight is converted, for any of the names it has."""
        return self._first.get(name, name)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        state = self.model.state_dict()
        return {name: tuple(state[name].shape) for name in self.names}

    @cached_property
    def _fractions(self) -> frozenset[str]:
        """The names of what is of a floating point type; buffers may be whole numbers."""
        state = self.model.state_dict()
        return frozenset(name for name in self.names if state[name].is_floating_point())

    @cached_property
    def saved_names(self) -> dict[str, str]:
        """For each name in `names`, the one that `save_pretrained` would start from; tied weights may differ."""
        return {self.first_name(name): name for name in untied_state_dict(self.model, self.model.state_dict())}

    @cached_property
    def most_stored(self) -> int:
        """How many tensors a store with this model and its optimizer's state may have."""
        parts = sum(shape[0] if len(shape) == 3 else 1 for shape in self.shapes.values())
        return min(MOST_TENSORS, _STORED_PER_WEIGHT * parts + _STORED_BESIDES)

    def check(self, names: Iterable[str], where: str) -> None:
        """Checks that a checkpoint has every weight of the model and no other.

        Raises:
            OwnWeights: it has tied ones a second time, as these formats do for weights of their own.
            CheckpointError: naming those that are missing or surplus.
        """
        found = set(names)
        missing = [name for name in self.saved_names if name not in found]
        surplus = sorted(found - set(self.names))
        if surplus and not missing and self.ties_always and all(name in self._first for name in surplus):
            raise OwnWeights(where, surplus)
        if missing or surplus:
            raise CheckpointError(
                f"{where} does not fit {type(self.model).__name__}: {_some('missing', missing)}"
                f"{_some('surplus', surplus)}see that the config is the one of this checkpoint."
            )

    def check_entries(self, entries: Mapping[Key, TensorMeta], where: str) -> None:
        """Checks that every tensor has the shape and kind of its weight, and belongs to one that is there.

        Raises:
            CheckpointError: naming the tensor.
        """
        for key, entry in entries.items():
            if Key(WEIGHT, key.name) not in entries:
                raise CheckpointError(f"{where} has {key}, and no such weight.")
            if entry.shape != self.shapes[key.name]:
                raise CheckpointError(
                    f"{where}: {key} has shape {entry.shape}, {type(self.model).__name__} with this config has "
                    f"{self.shapes[key.name]}."
                )
            if key.name in self._fractions and not entry.dtype.is_floating_point:
                raise CheckpointError(
                    f"{where}: {key} is of {entry.dtype}, and a floating point number in {type(self.model).__name__}: "
                    "quantized weights are not converted."
                )

    def sort_key(self, key: Key) -> tuple[int, bool, str]:
        """Orders tensors as the model has them, each weight before what belongs to it."""
        return self._position[key.name], key.kind != WEIGHT, key.kind

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what} ({', '.join(names[:50])}{', ...' if len(names) > 50 else ''}); "

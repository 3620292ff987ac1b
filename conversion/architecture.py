"""Model that a checkpoint belongs to: its tensors in memory, and their names in files."""

import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.meta_model import load_meta_model, meta_model
from ..checkpoint.untrusted_config import CONFIG, settings
from ..compat.transformers_loading import untied_state_dict
from ..core.io.safetensors import MOST_TENSORS, TensorMeta
from ..core.text import safe_repr
from ..errors import CheckpointError
from .interfaces import WEIGHT, Key

# Upper bound on the tensors of a store: per weight (or per expert of a packed weight) the optimizer's tensors and
# settings, possibly stored in halves; plus a constant for RNG states and layers that are left out.
_STORED_PER_WEIGHT, _STORED_BESIDES = 32, 10_000
_QUANTIZATIONS = ("quantization_config", "compression_config")


class OwnWeights(CheckpointError):
    """Raised if a checkpoint holds separate values for weights that the class ties; transformers then unties them.

    Args:
        names: the second names, in `state_dict()`, of the tied weights.
    """

    def __init__(self, where: str, names: Iterable[str]):
        self.names = tuple(names)
        super().__init__(f"{where}: {', '.join(self.names)} have separate values, but the model ties them.")


def untie(model: Any, names: Iterable[str]) -> None:
    """Replaces tied weights of a model, of any shapes, under these names by separate parameters."""
    for name in names:
        module, _, weight = name.rpartition(".")
        owner = model.get_submodule(module)
        owner.register_parameter(weight, torch.nn.Parameter(getattr(owner, weight).detach().clone()))


class Architecture:
    """A model class of transformers with a config, without weights.

    Args:
        model: an instance on the meta device.

    Attributes:
        names: its parameters and persistent buffers in module order, a tied one under its first name.
        num_mtp_layers: number of multi-token prediction layers, which follow the layers of the class.
        untied: names of weights that the class ties but this checkpoint stores separately.
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
        """Creates it from a class of transformers and a config."""
        return cls(meta_model(model_class, config))

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> "Architecture":
        """Creates it from the config.json in a folder.

        Raises:
            CheckpointError: there is no config.json, it names no class of transformers, or the weights are quantized.
        """
        architecture = cls(load_meta_model(path))
        for name, value in settings(architecture.config.to_dict()):
            if name.endswith(_QUANTIZATIONS) and value:
                method = value.get("quant_method") if isinstance(value, dict) else value
                raise CheckpointError(
                    f"{Path(path) / CONFIG}: {safe_repr(name)} has quant_method {safe_repr(method)}; quantized "
                    "weights cannot be converted. Dequantize them first, or delete this setting if the weights are "
                    "not quantized."
                )
        return architecture

    def include_mtp(self, layers: Sequence[Any]) -> "Architecture":
        """Returns a copy with these multi-token prediction layers appended to its own."""
        model = copy.deepcopy(self.model)
        model.get_decoder().layers.extend(layers)
        return Architecture(model, len(layers), self.untied)

    def with_own_weights(self, names: Iterable[str]) -> "Architecture":
        """Returns a copy in which the weights under these names, which the class ties, are separate."""
        model, names = copy.deepcopy(self.model), tuple(names)
        untie(model, names)
        return Architecture(model, self.num_mtp_layers, (*self.untied, *names))

    @cached_property
    def ties_always(self) -> bool:
        """Whether the class ties the head whatever its config says, so that only files (as T5's) show an untied one."""
        if not getattr(self.config, "tie_word_embeddings", False) or self.untied:
            return False
        untied_config = type(self.config).from_dict({**self.config.to_dict(), "tie_word_embeddings": False})
        return bool(untied_config.tie_word_embeddings)

    def first_name(self, name: str) -> str:
        """Returns the name under which a weight is converted, given any of its names."""
        return self._first.get(name, name)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        state = self.model.state_dict()
        return {name: tuple(state[name].shape) for name in self.names}

    @cached_property
    def _fractions(self) -> frozenset[str]:
        """The names of floating-point tensors; buffers may be integers."""
        state = self.model.state_dict()
        return frozenset(name for name in self.names if state[name].is_floating_point())

    @cached_property
    def saved_names(self) -> dict[str, str]:
        """For each name in `names`, the one that `save_pretrained` uses; tied weights may differ."""
        return {self.first_name(name): name for name in untied_state_dict(self.model, self.model.state_dict())}

    @cached_property
    def most_stored(self) -> int:
        """Upper bound on the tensors of a store with this model and its optimizer state."""
        parts = sum(shape[0] if len(shape) == 3 else 1 for shape in self.shapes.values())
        return min(MOST_TENSORS, _STORED_PER_WEIGHT * parts + _STORED_BESIDES)

    def check(self, names: Iterable[str], where: str) -> None:
        """Checks that a checkpoint has every weight of the model and no other.

        Raises:
            OwnWeights: tied weights are stored under both names, as these formats do for separate weights.
            CheckpointError: naming missing or surplus weights.
        """
        name_set = set(names)
        missing = [name for name in self.saved_names if name not in name_set]
        surplus = sorted(name_set - set(self.names))
        if surplus and not missing and self.ties_always and all(name in self._first for name in surplus):
            raise OwnWeights(where, surplus)
        if missing or surplus:
            raise CheckpointError(
                f"{where} does not fit {type(self.model).__name__}: {_some('missing', missing)}"
                f"{_some('surplus', surplus)}check that the config belongs to this checkpoint."
            )

    def check_entries(self, entries: Mapping[Key, TensorMeta], where: str) -> None:
        """Checks that every tensor has its weight's shape and type, and that this weight is present.

        Raises:
            CheckpointError: naming the tensor.
        """
        for key, entry in entries.items():
            if Key(WEIGHT, key.name) not in entries:
                raise CheckpointError(f"{where} has {key}, but no weight of that name.")
            if entry.shape != self.shapes[key.name]:
                raise CheckpointError(
                    f"{where}: {key} has shape {entry.shape}, but {type(self.model).__name__} with this config has "
                    f"{self.shapes[key.name]}."
                )
            if key.name in self._fractions and not entry.dtype.is_floating_point:
                raise CheckpointError(
                    f"{where}: {key} has dtype {entry.dtype}, but is floating point in {type(self.model).__name__}; "
                    "quantized weights cannot be converted. Dequantize them first."
                )

    def sort_key(self, key: Key) -> tuple[int, bool, str]:
        """Returns a sort key for the order of the model, each weight before its optimizer state."""
        return self._position[key.name], key.kind != WEIGHT, key.kind

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what} ({', '.join(names[:50])}{', ...' if len(names) > 50 else ''}); "

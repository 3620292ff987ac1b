"""Identities of a model's parameters, collected again only after modules or parameters were added or replaced."""

import operator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..compat.shared import Shared
from ..compat.torch_fsdp import find_unsharded, sharded_states
from ..core.off_stage import is_off_stage


class ParameterIdentities(Shared):
    """Set of the identities of a model's parameters, read in backwards of any model in the process.

    Reading it compares the tables of the model's modules with those read before, in C: no module is visited in Python.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Releases everything that was collected, such as replaced parameters."""
        self._modules: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._containers: list[dict[str, nn.Parameter | None]] = []
        # FSDP2's states of the parameters that it shards.
        self._sharded: list[Any] = []
        self._ids: list[int] = []
        # Positions of this stage's parameters in the list of all.
        self._local: list[int] = []
        self._identities: set[int] = set()

    def current(self) -> set[int]:
        """Returns the identities of all parameters, including off-stage ones."""
        self._update()
        return self._identities

    def differentiable(self) -> list[Tensor]:
        """Returns the tensors of any shape that forwards on this rank may differentiate, unsharded ones included."""
        values = self._update()
        trained = [value for value in map(values.__getitem__, self._local) if value.requires_grad]
        return trained + find_unsharded(self._sharded)

    def unsharded(self) -> list[Tensor]:
        """Returns the unsharded weights, of any shape, that FSDP2 computes with."""
        self._update()
        return find_unsharded(self._sharded)

    def sharded_states(self) -> list[Any]:
        """Returns FSDP2's states of the parameters that it shards."""
        self._update()
        return self._sharded

    def _update(self) -> list[Any]:
        """Collects the identities again if they changed; returns the parameters of all modules, with repetitions."""
        children = list(chain.from_iterable(map(dict.values, self._children)))
        is_same = len(children) == len(self._modules) and all(map(operator.is_, children, self._modules))
        if not is_same or not self._children:
            self._scan()
        values = list(chain.from_iterable(map(dict.values, self._containers)))
        ids = list(map(id, values))
        if ids != self._ids:
            self._ids, self._identities = ids, {id(value) for value in values if value is not None}
            self._local = [i for i, value in enumerate(values) if value is not None and not is_off_stage(value)]
        return values

    def _scan(self) -> None:
        modules = list(self.model.modules())
        self._children = [module._modules for module in modules]
        self._modules = list(chain.from_iterable(map(dict.values, self._children)))  # type: ignore[arg-type]
        self._containers = [module._parameters for module in modules]
        self._sharded = sharded_states(self.model)
        self._ids = []

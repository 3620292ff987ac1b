"""Parameters of a data-parallel model: the current list, their shardings and the ranks that average their gradients."""

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.shared import Shared
from ..core.communication.rank_errors import gather
from ..core.io.checksums import hash_tensor
from ..core.off_stage import is_off_stage
from ..core.placement import GradientRule, ParameterSharding
from ..errors import ConfigError, RankError, UnsupportedError
from ..parallel_state import ParallelState
from .grad_sync_groups import GradSyncGroup

# Stock loops pass parameters, not models: each parameter refers to its engine.
MARK = "_hf_megatron"
# Attribute of a parameter that was replaced by one of another size.
REPLACED = "_hf_megatron_replaced"


class ModelParameters(Shared):
    """Parameters that a model has at present, by identity.

    A caller may replace a parameter, and moving a model may too; modules that are added later are found by `scan`.

    Attributes:
        marked: this rank's parameters when `mark` was last called.
        sync_groups: axis along which gradients are averaged -> its ranks.
        copies: parameter's identity -> number of ranks that hold the same entries of its gradient, where it is known.
        reduced_copies: the same for gradients in the reducer's buckets.
        uncompared: name -> parameter that was added after loading and has not been compared with the other ranks'.
    """

    def __init__(self, model: nn.Module, state: ParallelState, sync_groups: dict[str, GradSyncGroup] | None = None):
        self.model, self.state = model, state
        if sync_groups is None:
            # Includes the axes of off-stage parameters: every rank of the job takes part in creating each group.
            axes = sorted(
                {GradientRule().average} | {sharding.gradient.average for sharding in state.shardings.values()}
            )
            sync_groups = {axis: GradSyncGroup.along(axis, state.mesh) for axis in axes}
        self.sync_groups = sync_groups
        self.marked: list[nn.Parameter] = []
        self.copies: dict[int, int] = {}
        self.reduced_copies: dict[int, int] = {}
        self.uncompared: dict[str, nn.Parameter] = {}
        self._added: dict[str, nn.Parameter] = {}
        self._identities: set[int] = set()
        self._shardings: dict[int, ParameterSharding] = {}
        # The `_parameters` of all modules that have some: reading them finds replaced parameters without a walk.
        self._containers: list[dict[str, nn.Parameter | None]] | None = None
        # What they held when `current` was last called, and the result, which is never changed in place.
        self._values: list[nn.Parameter | None] = []
        self._current: list[nn.Parameter] = []

    def for_copy(self, model: nn.Module, state: ParallelState) -> "ModelParameters":
        """Returns the parameters of a deep copy of the model."""
        return ModelParameters(model, state, self.sync_groups)

    def scan(self) -> None:
        """Finds modules that were added or replaced."""
        self._containers = [module._parameters for module in self.model.modules() if _has_local(module)]

    def current(self) -> list[nn.Parameter]:
        """Returns this rank's parameters, each once, in the order of `model.parameters()`."""
        if self._containers is None:
            self.scan()
        assert self._containers is not None
        values = list(chain.from_iterable(map(dict.values, self._containers)))
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            # Checked per parameter: a module may have both kinds, such as a head with a tied weight and an off-stage
            # bias.
            self._current = list({id(p): p for p in values if p is not None and not is_off_stage(p)}.values())
            self._values = values
        return self._current

    def is_marked(self, parameters: list[nn.Parameter]) -> bool:
        """Returns whether these are the parameters that were marked last."""
        return parameters is self.marked or (
            len(parameters) == len(self.marked) and all(map(operator.is_, parameters, self.marked))
        )

    def mark(self, parameters: list[nn.Parameter], engine: Any) -> None:
        """Sets the engine attribute of all parameters, and looks their shardings up."""
        # Off-stage parameters are marked too: optimizers and norms receive them in lists of all stages' parameters.
        names, shardings = self.names(), self.state.shardings
        for parameter in self.model.parameters():
            setattr(parameter, MARK, engine)
        self._shardings = {identity: shardings[name] for identity, name in names.items() if name in shardings}
        self.copies, self.reduced_copies = {}, {}
        self.marked, self._identities = parameters, {id(parameter) for parameter in parameters}
        # With tensor parallelism, `ParameterCheck` rejects added parameters.
        candidates = parameters if self.state.axes.size("tp") == 1 else []
        added = {names[id(p)]: p for p in candidates if id(p) in names and id(p) not in self._shardings}
        if added.keys() != self._added.keys() or any(added[name] is not self._added[name] for name in added):
            self._added = self.uncompared = added

    def require_equal_on_ranks(self) -> None:
        """Raises an error if ranks hold different values or shards of parameters added after loading; collective.

        Raises:
            ConfigError: the ranks drew different values.
            UnsupportedError: a sharded weight got another name, so that its sharding is unknown.
        """
        # Tensor parallelism has rejected such weights before.
        if sharded := [name for name, parameter in self.uncompared.items() if isinstance(parameter, DTensor)]:
            ranks, field = ("data", "zero_stage=2") if self.state.shards_weights else ("expert", "ep_size=1")
            raise UnsupportedError(
                f"{sharded[0]} is sharded over {ranks}-parallel ranks, but its module was wrapped or renamed after "
                f"loading. Set {field}."
            )
        hashes = {name: hash_tensor(parameter.detach()) for name, parameter in self.uncompared.items()}
        # "stage": the ranks of one pipeline stage, which train copies of these parameters.
        group = self.state.mesh.host_group("stage")
        others = gather(hashes, group, "Comparing the parameters added after loading", error_type=RankError)
        for name in sorted({name for other in others for name in other}):
            if any(other.get(name) != others[0].get(name) for other in others):
                raise ConfigError(
                    f"{name} was added after loading, and its values differ between ranks. Call torch.manual_seed with "
                    "the same seed on every rank before you create it."
                )
        self.uncompared = {}

    @property
    def trained(self) -> list[nn.Parameter]:
        """This rank's parameters that are trained at present."""
        return [parameter for parameter in self.current() if parameter.requires_grad]

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether a tensor of any shape is one of this rank's parameters."""
        return id(parameter) in self._identities

    def names(self) -> dict[int, str]:
        """Returns the name in the state dict by identity of each parameter; a tied one has its first name."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def name(self, parameter: Tensor) -> str:
        """Returns the name of a parameter of any shape in the state dict, or "a parameter"."""
        return self.names().get(id(parameter), "a parameter")

    def sharding(self, parameter: Tensor) -> ParameterSharding | None:
        """Returns the sharding of a parameter of any shape; `None` for one that was added after planning."""
        return self._shardings.get(id(parameter))

    def sync_group(self, parameter: Tensor) -> GradSyncGroup:
        """Returns the ranks that average the gradient of a parameter of any shape."""
        sharding = self.sharding(parameter)
        rule = GradientRule() if sharding is None else sharding.gradient
        return self.sync_groups[rule.average]

    def is_split(self, parameter: Tensor) -> bool:
        """Returns whether ranks hold different shards of a parameter of any shape."""
        sharding = self.sharding(parameter)
        return sharding is not None and sharding.placement.on(self.state.axes).is_split

    def holders(self, parameter: Tensor) -> int:
        """Returns the number of ranks of the job that hold a parameter of any shape or a shard of it."""
        # "stage": the ranks of one pipeline stage, over all other axes. Two stages hold a tied weight.
        sharding = self.sharding(parameter)
        tied = sharding is not None and self.state.is_tied(sharding.name)
        return self.state.axes.size("stage") * (2 if tied else 1)

    def is_outside_fsdp(self, parameter: Tensor) -> bool:
        """Returns whether a parameter of any shape was placed after FSDP2 split the others (adapters)."""
        sharding = self.sharding(parameter)
        return sharding is not None and not self.state.shards(sharding.name)

    def reduced(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Returns those whose gradients FSDP2 does not reduce."""
        if not self.state.shards_weights:
            return parameters
        return [parameter for parameter in parameters if self.is_outside_fsdp(parameter)]

    def split_by_fsdp(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Returns those that FSDP2 splits, in ZeRO stage 3."""
        others = {id(parameter) for parameter in self.reduced(parameters)}
        return [parameter for parameter in parameters if id(parameter) not in others]


def _has_local(module: nn.Module) -> bool:
    return any(parameter is not None and not is_off_stage(parameter) for parameter in module._parameters.values())


def reject_replaced(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raises `ConfigError` if an optimizer's parameters, of any shape, were replaced since it was created."""
    if any(REPLACED in vars(parameter) for parameter in parameters):
        raise ConfigError(
            f"{type(optimizer).__name__} was created before resize_token_embeddings and holds the embeddings of the "
            "old size. Create the optimizer after resizing."
        )


def carries_engine(parameter: torch.Tensor) -> bool:
    """Returns whether a tensor of any shape refers to its engine."""
    return MARK in vars(parameter)

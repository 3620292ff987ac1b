"""Adapted module: its sharding, and the placement of its adapters' parameters as local shards."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core.communication.rng import TensorParallelRng
from ...core.placement import ADAPTER, GradientRule, ParameterSharding, Placement
from ...parallel_state import ParallelState
from ...tensor_parallel.axis import FORWARDS, NAME, REGIONS
from ...tensor_parallel.local_parameters import ActiveForwards
from .factors import Factors, plan_factors


@dataclass(frozen=True)
class Site:
    """Location of adapters in a parallelized model.

    Attributes:
        name: name of the tuner layer in the model, which used to be the name of its base.
        base: the wrapped module.
        base_name: name of the wrapped module in the model.
        state: state of the model.
        copies: the smallest number of ranks that hold copies of a shard (`count_shared_copies`).
        is_off_stage: whether the module belongs to another pipeline stage.
    """

    name: str
    base: nn.Module
    base_name: str
    state: ParallelState
    copies: int
    is_off_stage: bool

    @property
    def splits(self) -> bool:
        """Whether the model is split over tp."""
        return self.state.placed.get(NAME) is not None

    @property
    def rng(self) -> TensorParallelRng:
        return self.state.placed[REGIONS].rng

    @property
    def forwards(self) -> ActiveForwards:
        return self.state.placed[FORWARDS]

    def factors(self) -> Factors | None:
        """Returns the tp sharding of a low-rank adapter on the base, a linear; `None` without tensor parallelism."""
        return linear_factors(self.state, self.name, f"{self.base_name}.weight")

    def has_sharding(self, inner: str) -> bool:
        """Returns whether a parameter inside the tuner layer has a sharding spec."""
        return f"{self.name}.{inner}" in self.state.shardings

    def place(
        self,
        holder: nn.Module,
        param_name: str,
        inner: str,
        placement: Placement,
        rule: GradientRule,
        *,
        keeps_average: bool = False,
    ) -> None:
        """Registers the sharding of a full parameter of any shape, and replaces it by this rank's shard.

        Args:
            holder: module that owns the parameter.
            own, inner: names of the parameter in its module and in the tuner layer.
            placement: sharding of the parameter.
            rule: reduction of its gradient.
            keeps_average (`bool`, defaults to `False`): whether to keep the averaging group of `rule`; otherwise the
                gradient is averaged over all ranks with different data.
        """
        unsharded: Any = holder._parameters[param_name]
        if not keeps_average:
            rule = replace(rule, average=GradientRule().average)
        self._add_sharding(inner, tuple(unsharded.shape), placement, rule)
        if (self.splits or placement.is_split) and not self.is_off_stage:
            part = _part(unsharded.detach(), placement, self.state, self.copies)
            holder._parameters[param_name] = nn.Parameter(part, requires_grad=unsharded.requires_grad)

    def replicate_value(self, holder: nn.Module, param_name: str, inner: str) -> None:
        """Places a parameter of any shape as replicated."""
        self.place(holder, param_name, inner, Placement(), GradientRule())

    def add_copy(self, inner: str, sharding: ParameterSharding) -> None:
        """Registers the sharding of a parameter that is a copy of one of the base."""
        self._add_sharding(inner, sharding.shape, sharding.placement, sharding.gradient)

    def _add_sharding(self, inner: str, shape: tuple[int, ...], placement: Placement, rule: GradientRule) -> None:
        name = f"{self.name}.{inner}"
        self.state.shardings[name] = ParameterSharding(name, shape, ADAPTER, placement, rule)


def linear_factors(state: ParallelState, name: str, weight: str) -> Factors | None:
    """Returns the tp sharding of a low-rank adapter on a linear; `None` without tensor parallelism.

    Args:
        state: state of the model.
        name: name of the linear when the model was parallelized.
        weight: current name of its weight.

    Raises:
        UnsupportedError: the linear's style has no rule for adapters.
    """
    plan = state.placed.get(NAME)
    if plan is None:
        return None
    region, sharding = state.placed[REGIONS].of_linear.get(name), state.shardings[weight]
    if any(name.startswith(f"{block}.") for block in plan.heads):
        # With adapters inside, every rank computes all heads of such a block, so gradients are complete.
        return plan_factors(name, "replicated", replace(sharding, gradient=GradientRule()), region)
    return plan_factors(name, plan.styles.get(name, "replicated"), sharding, region)


def _part(unsharded: Tensor, placement: Placement, state: ParallelState, copies: int) -> DTensor:
    """Returns this rank's shard of a tensor of any shape that every rank has in full."""
    local = unsharded
    # An interval list per dim: a fused weight keeps several slices of one dim.
    for dim, ranges in enumerate(placement.intervals(unsharded.shape, state.axes)):
        local = torch.cat([local.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        state.mesh.of(placement, copies),
        placement.dtensor_placements(state.axes, copies),
        run_check=False,
        shape=unsharded.shape,
        stride=unsharded.stride(),
    )

"""Tensor-parallel sharding of the two factors of a low-rank adapter on a linear.

The adapter's output is added to the linear's output, so both need the same layout. `A [r, in]` and `B [out, r]` are
PEFT's names; sums are over tp.

| linear | `A` | its gradient | `B` | its gradient |
|---|---|---|---|---|
| colwise, in a region | replicated | sum | split dim 0 | complete |
| colwise without a region, `colwise_gather_output` | replicated | complete | split dim 0, its input copied | complete |
| rowwise | split dim 1, its output summed | complete | replicated | complete |
| rowwise, sequence-sharded output | split dim 1, its output reduce-scattered | complete | replicated | sum |
| `rowwise_split_input` | split dim 1, its input split | complete | replicated | complete |
| replicated | replicated | the weight's rule | replicated | the weight's rule |

A region copies its input to the ranks once, where the block begins, so every gradient inside it is partial. If several
ranks hold copies of a shard of the linear, the same ranks hold copies of the shard of `B`.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import linear

from ...core.placement import GradientRule, ParameterSharding, Placement
from ...errors import UnsupportedError
from ...tensor_parallel.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from ...tensor_parallel.local_parameters import local_view
from ...tensor_parallel.region import UniformRegion
from ...tensor_parallel.styles import AXIS, style

_SUMMED = GradientRule(sum=AXIS)


class FullFactor(ParallelLinear):
    """A replicated linear whose gradient may be partial: `[..., in]` -> `[..., out]`."""

    sum_gradient: bool = False

    def forward(self, x: Tensor) -> Tensor:
        # With a group, the backward sums the weight gradient over tp.
        group = self.group if self.sum_gradient else None
        weight, bias = local_view(self.weight, group), local_view(self.bias, group)
        assert weight is not None
        gathered = None if self.region is None else self.region.gathered
        # If saved activations are sharded, only the local shard of the region's input `[..., in]` is saved.
        return linear(x, weight, bias) if gathered is None else gathered.run(linear, x, weight, bias)


@dataclass(frozen=True)
class Factor:
    """One factor of an adapter.

    Attributes:
        kind: class that computes with it.
        weight, bias: placements.
        rule: reduction of their gradients.
        region (*optional*): region of the linear, if the factor takes part in it.
        switches: attributes to set on the module.
    """

    kind: type[ParallelLinear]
    weight: Placement
    bias: Placement
    rule: GradientRule
    region: UniformRegion | None = None
    switches: tuple[tuple[str, bool], ...] = ()

    def placement(self, parameter_name: str) -> Placement:
        """Returns the placement of its weight or its bias."""
        return self.weight if parameter_name == "weight" else self.bias

    def has(self, switch: str) -> bool:
        """Returns whether a switch is on."""
        return dict(self.switches).get(switch, False)

    def along(self, dim: int) -> Placement:
        """Returns the placement of a tensor with the linear's features along `dim`, as in the factor's weight."""
        if self.has("gather_output") or self.has("split_input"):
            # Outside the linear its features are unsharded.
            return Placement()
        return Placement(tuple(replace(split, dim=dim) for split in self.weight.splits))


@dataclass(frozen=True)
class Factors:
    """Both factors, and whether every rank has their full input."""

    a: Factor
    b: Factor
    input_is_full: bool


def plan_factors(name: str, style_name: str, sharding: ParameterSharding, region: UniformRegion | None) -> Factors:
    """Returns the sharding of an adapter on a linear.

    Args:
        name: name of the linear, for errors.
        style_name: style of the linear.
        sharding (`ParameterSharding`): sharding of the linear's weight.
        region (`UniformRegion`, *optional*): region that the linear reads or ends.

    Raises:
        UnsupportedError: a style without a row in the table.
    """
    rules = style(style_name)
    if rules.is_column or style_name == "colwise_gather_output":
        [split] = sharding.placement.splits
        over = Placement.split(AXIS, 0, groups=split.groups, copies=split.copies)
        rule = GradientRule(sum=AXIS, copies=split.copies) if split.copies > 1 else GradientRule()
        first = Factor(
            FullFactor,
            Placement(),
            Placement(),
            GradientRule() if region is None else _SUMMED,
            region,
            (("sum_gradient", region is not None),),
        )
        gathers = (("gather_output", style_name == "colwise_gather_output"),)
        return Factors(first, Factor(ColumnParallelLinear, over, over, rule, region, gathers), True)
    if rules.is_row or style_name == "rowwise_split_input":
        sums = region is not None and region.stack is not None
        along = (("split_input", style_name == "rowwise_split_input"),)
        first = Factor(RowParallelLinear, Placement.split(AXIS, 1), Placement(), GradientRule(), region, along)
        switches = (("sum_gradient", sums),)
        second = Factor(FullFactor, Placement(), Placement(), _SUMMED if sums else GradientRule(), None, switches)
        return Factors(first, second, style_name == "rowwise_split_input")
    if style_name in ("replicated", "replicated_with_grad_allreduce", "mla_kv_a_proj"):
        switches = (("sum_gradient", sharding.gradient.sum == AXIS),)
        both = Factor(FullFactor, Placement(), Placement(), sharding.gradient, None, switches)
        return Factors(both, both, True)
    raise UnsupportedError(
        f"A PEFT adapter on {name}: adapters on {style_name!r} modules are not supported with tp_size > 1. Remove it "
        "from target_modules, or load the model with tp_size=1."
    )

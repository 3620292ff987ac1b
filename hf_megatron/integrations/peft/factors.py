"""The two factors of a low-rank adapter beside a linear, and where each of them lies over tp.

What an adapter returns is added to what its linear returns, so both have to be in one state. `A [r, in]` and
`B [out, r]` are PEFT's names; sums are over tp.

| linear | `A` | its gradient | `B` | its gradient |
|---|---|---|---|---|
| column, in a region | whole | sum | split dim 0 | complete |
| column without a region, `colwise_gather_output` | whole | complete | split dim 0, its input copied | complete |
| row | split dim 1, its output summed | complete | whole | complete |
| row of a split sequence | split dim 1, its output summed and cut along the sequence | complete | whole | sum |
| `rowwise_split_input` | split dim 1, its input cut | complete | whole | complete |
| replicated | whole | the weight's rule | whole | the weight's rule |

A region copies its input once, where the block begins: every gradient inside of it is a part. `B` of a linear that
several ranks hold a shard of is shared by the same ranks.
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
    """A linear that every rank has whole, whose gradient may be a part: `[..., in]` -> `[..., out]`."""

    sum_gradient: bool = False

    def forward(self, x: Tensor) -> Tensor:
        group = self.group if self.sum_gradient else None
        weight, bias = local_view(self.weight, group), local_view(self.bias, group)
        assert weight is not None
        if self.region is None:
            return linear(x, weight, bias)
        x, saving = self.region.column_input(x)
        with saving:
            return linear(x, weight, bias)


@dataclass(frozen=True)
class Factor:
    """One factor of an adapter.

    Attributes:
        kind: what computes with it.
        weight, bias: where they lie.
        rule: what their gradients need.
        region (*optional*): of the linear, if the factor takes part in it.
        switches: attributes of what computes with it.
    """

    kind: type[ParallelLinear]
    weight: Placement
    bias: Placement
    rule: GradientRule
    region: UniformRegion | None = None
    switches: tuple[tuple[str, bool], ...] = ()

    def placement(self, own: str) -> Placement:
        """Returns where its weight or its bias lies."""
        return self.weight if own == "weight" else self.bias

    def has(self, switch: str) -> bool:
        """Tells whether a switch is on."""
        return dict(self.switches).get(switch, False)

    def along(self, dim: int) -> Placement:
        """Returns where a tensor lies that has one of the linear's features along a dim, as the factor's weight has."""
        if self.has("gather_output") or self.has("split_input"):
            # Outside of the linear its features are whole.
            return Placement()
        return Placement(tuple(replace(split, dim=dim) for split in self.weight.splits))


@dataclass(frozen=True)
class Factors:
    """Both factors, and whether every rank has their whole input."""

    a: Factor
    b: Factor
    input_is_full: bool


def factors_of(name: str, style_name: str, sharding: ParameterSharding, region: UniformRegion | None) -> Factors:
    """Returns how an adapter beside a linear lies.

    Args:
        claim (`ParameterSharding`): of the linear's weight.
        region (`UniformRegion`, *optional*): that the linear reads or ends.

    Raises:
        UnsupportedError: for a style that has no row in the table.
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
        unsharded = (("sum_gradient", sums),)
        second = Factor(FullFactor, Placement(), Placement(), _SUMMED if sums else GradientRule(), None, unsharded)
        return Factors(first, second, style_name == "rowwise_split_input")
    if style_name in ("replicated", "replicated_with_grad_allreduce", "mla_kv_a_proj"):
        unsharded = (("sum_gradient", sharding.gradient.sum == AXIS),)
        both = Factor(FullFactor, Placement(), Placement(), sharding.gradient, None, unsharded)
        return Factors(both, both, True)
    raise UnsupportedError(
        f"A PEFT adapter on {name}: with tp_size > 1 adapters on {style_name!r} modules are not supported. Leave it "
        "out of target_modules, or load the model with tp_size=1."
    )

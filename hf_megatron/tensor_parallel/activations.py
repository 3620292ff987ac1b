"""How the tensors that a module is given and returns lie over the tp ranks, and how to have them whole.

| form | forward, opened and closed | backward |
|---|---|---|
| `Form` | as it is: every rank has all of it | as it is |
| `Tokens` | all-gather along the sequence, own part | own part, all-gather |
| `Features` | the same along the last dim, for each of its blocks | the same |
| `Addends` | as it is, of which each rank computes an addend of the gradient | the first rank's alone, all-reduce |
| `InsideMLP` | `Features` until the block's row linear has summed | the same |

Whatever is computed between opening and closing is computed by all ranks alike, from one process's tensors and
gradients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..communication.collectives import bounds, copy_to_ranks, gather_from_ranks, split_over_ranks
from ..errors import UnsupportedError
from ..patch_ledger import Shared
from ..placement import Claim
from ..upstream import computes_own_attention, fetches_attention_core
from .logits import ShardedLogits
from .place_regions import Regions
from .region import HIDDEN_STATES, SEQUENCE_DIM, SequenceStack, UniformRegion
from .structure import Structure
from .styles import style

HEADS_DIM = 1


class _OfFirstRank(torch.autograd.Function):
    """Identity whose gradient, which all ranks compute alike, is counted once in a sum over them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.is_first = dist.get_rank(group) == 0
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient if ctx.is_first else torch.zeros_like(gradient), None


class Form(Shared):
    """A tensor that every rank has whole, with its whole gradient."""

    is_split = False

    def open(self, tensor: Any) -> Any:
        """Returns the whole tensor of what a rank has, of any shape."""
        return tensor

    def close(self, whole: Any) -> Any:
        """Returns what a rank has of a whole tensor."""
        return whole


class Logits(Form):
    """What a vocabulary head returns: logits that may not be computed yet."""

    def open(self, tensor: Any) -> Any:
        return tensor.gather(warn=False) if isinstance(tensor, ShardedLogits) else tensor


@dataclass
class Tokens(Form):
    """`[batch, held, ...]` or `[batch * held, ...]` of `[batch, sequence, ...]`."""

    stack: SequenceStack
    is_split = True

    def open(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            return self.open(tensor.view(self.stack.batch, -1, tensor.shape[1])).flatten(0, 1)
        return gather_from_ranks(tensor, SEQUENCE_DIM, self.stack.length, self.stack.group)

    def close(self, whole: Tensor) -> Tensor:
        if whole.dim() == 2:
            return self.close(whole.unflatten(0, (self.stack.batch, self.stack.length))).flatten(0, 1)
        if whole.shape[SEQUENCE_DIM] != self.stack.length:
            raise UnsupportedError(
                f"A forward hook made {whole.shape[SEQUENCE_DIM]} tokens of {self.stack.length}: with "
                "sequence_parallel=True each rank has its part of them between layers. Set sequence_parallel=False."
            )
        return split_over_ranks(whole, SEQUENCE_DIM, self.stack.group)


@dataclass
class Features(Form):
    """`[..., held]` of `[..., size]`, in each of `groups` blocks of the last dim."""

    size: int
    group: dist.ProcessGroup
    groups: int = 1
    is_split = True

    def open(self, tensor: Tensor) -> Tensor:
        parts = tensor.unflatten(-1, (self.groups, tensor.shape[-1] // self.groups))
        return gather_from_ranks(parts, -1, self.size // self.groups, self.group).flatten(-2)

    def close(self, whole: Tensor) -> Tensor:
        blocks = whole.unflatten(-1, (self.groups, whole.shape[-1] // self.groups))
        return split_over_ranks(blocks, -1, self.group).flatten(-2)


@dataclass
class Heads(Form):
    """`[batch, heads / tp, ...]` of `[batch, heads, ...]`."""

    group: dist.ProcessGroup
    is_split = True

    def open(self, tensor: Tensor) -> Tensor:
        return gather_from_ranks(tensor, HEADS_DIM, tensor.shape[HEADS_DIM] * self.group.size(), self.group)

    def close(self, whole: Tensor) -> Tensor:
        return split_over_ranks(whole, HEADS_DIM, self.group)


@dataclass
class Addends(Form):
    """A whole tensor inside a split block: each rank's gradient of it is an addend."""

    group: dist.ProcessGroup

    def open(self, tensor: Tensor) -> Tensor:
        return _OfFirstRank.apply(tensor, self.group)

    def close(self, whole: Tensor) -> Tensor:
        return copy_to_ranks(whole, self.group)


@dataclass
class InsideMLP(Form):
    """What an activation function or a dropout of an MLP meets: features before its row linear, its output behind."""

    region: UniformRegion
    features: Features
    behind: Form
    is_split = True

    def _form(self, held: int, has: str) -> Form:
        if not self.region.is_inside:
            return self.behind
        start, stop = bounds(self.features.size, self.features.group.size(), dist.get_rank(self.features.group))
        if held != (stop - start if has == "part" else self.features.size):
            raise UnsupportedError(
                f"A forward hook inside an MLP meets {held} features: how they are split is unknown."
            )
        return self.features

    def open(self, tensor: Tensor) -> Tensor:
        return self._form(tensor.shape[-1], "part").open(tensor)

    def close(self, whole: Tensor) -> Tensor:
        return self._form(whole.shape[-1], "whole").close(whole)


@dataclass(frozen=True)
class Forms:
    """How the hidden states of one module lie, or why that is not known.

    Attributes:
        given: as its caller gives them.
        inside: as its forward has them.
        returned: as its caller gets them.
        maps (*optional*): what is returned behind them with four dims.
    """

    given: Form | str
    inside: Form | str
    returned: Form | str
    maps: Form | None = None


WHOLE = Form()
_SUMS = ("partial_sum", "output_sum")


class Activations(Shared):
    """The forms of a model's modules, by name."""

    def __init__(
        self,
        structure: Structure,
        styles: Mapping[str, str],
        claims: Mapping[str, Claim],
        regions: Regions,
        kinds: Mapping[str, type],
    ):
        self.structure, self.styles, self.claims, self.regions = structure, styles, claims, regions
        self.group = regions.group
        self.attention = {name for name, kind in kinds.items() if _is_attention(kind)}
        self.split_blocks = {block for block in structure.whole if self._has(block, "splits")}
        rows = {name.rpartition(".")[0] for name, of in styles.items() if style(of).is_row}
        self.with_parts = {*regions.stacks} | {*structure.uniform, *self.split_blocks, *rows}

    def of(self, name: str, module: nn.Module) -> Forms:
        """Returns the forms of a module that was there when the model was laid out."""
        found = self._of(name, module)
        has_maps = any(_is_attention(type(part)) for part in module.modules()) and self._has(name, "is_column")
        ends = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        starts = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
        return Forms(
            WHOLE if any(isinstance(end, SequenceStack) for end in ends) else found.given,
            found.inside,
            WHOLE if any(isinstance(start, SequenceStack) for start in starts) else found.returned,
            Heads(self.group) if has_maps else None,
        )

    def see_parts(self, name: str) -> bool:
        """Tells whether what the functions of a module are called with may be a part of a tensor."""
        is_block = name in self.with_parts and name not in self.regions.stacks
        return is_block or self._within(name, self.with_parts) is not None

    def _of(self, name: str, module: nn.Module) -> Forms:
        style_name, outer = self.styles.get(name, "replicated"), self._outer(name)
        rules, region = style(style_name), self.regions.of_linear.get(name)
        if self._within(name, [other for other, of in self.styles.items() if of in _SUMS]):
            return _unknown("experts compute addends of a sum, each rank its part of their width")
        if style_name == "vocab_head":
            return Forms(WHOLE, WHOLE, Logits())
        if rules.is_column:
            before = WHOLE if region is None else Addends(self.group)
            return Forms(before, before, self._columns(name))
        if rules.is_row:
            before = self._width(name)
            return Forms(before, before, self._behind(region))
        if style_name == "latent_with_rotary":
            return Forms(outer, outer, "of its output a part goes to this rank's heads alone")
        if style_name in _SUMS:
            return Forms(outer, Addends(self.group) if style_name == "partial_sum" else outer, outer)
        if style_name == "column_gather" or (rules.splits and isinstance(module, nn.Embedding)):
            return Forms(outer, outer, outer)
        if block := self._within(name, self.structure.uniform):
            return self._inside(name, block, module)
        if not self._has(name, "splits"):
            return self._replicated(name, module, outer)
        if name in self.structure.uniform:
            row = self.structure.uniform[name]
            inside = row.startswith(f"{name}.")
            return Forms(outer, Addends(self.group), outer if inside else self._width(row))
        if (self._has(name, "is_column") and self._has(name, "is_row")) or self._holds_sum(name):
            return Forms(outer, WHOLE if name in self.regions.whole else outer, outer)
        return _unknown("its weights are split, and how its tensors are is not known")

    def _inside(self, name: str, block: str, module: nn.Module) -> Forms:
        if block in self.attention or any(True for _ in module.parameters()):
            return _unknown(f"it sees this rank's heads or features of {block}")
        row = self.structure.uniform[block]
        form = InsideMLP(self.regions.uniform[block], self._width(row), self._behind(self.regions.uniform[block]))
        return Forms(form, form, form)

    def _replicated(self, name: str, module: nn.Module, outer: Form) -> Forms:
        claims = [self.claims[f"{name}.{parameter}"] for parameter, _ in module.named_parameters()]
        if not claims and (block := self._within(name, self.split_blocks)):
            return _unknown(f"it may see a part of what {block} computes")
        partial = [claim.gradient.sum is not None for claim in claims]
        if any(partial) and (not outer.is_split or any(style(c.style).works_on_heads for c in claims)):
            return _unknown("it sees this rank's heads or features")
        return Forms(outer, outer, outer)

    def _outer(self, name: str) -> Form:
        stack = self._within(name, self.regions.stacks)
        if stack is None or self._within(name, (*self.structure.whole, *self.structure.stack_of)):
            return WHOLE
        return Tokens(self.regions.stacks[stack])

    def _columns(self, name: str) -> Form | str:
        claim = self.claims[f"{name}.weight"]
        [split] = claim.placement.splits
        if split.copies > 1:
            return "several ranks have the same key and value heads, and a part of their gradient each"
        return Features(claim.shape[split.dim], self.group, split.groups)

    def _width(self, row: str) -> Features:
        claim = self.claims[f"{row}.weight"]
        return Features(claim.shape[claim.placement.splits[0].dim], self.group)

    def _behind(self, region: UniformRegion | None) -> Form:
        return WHOLE if region is None or region.stack is None else Tokens(region.stack)

    def _within(self, name: str, others: Any) -> str | None:
        return next((other for other in others if name.startswith(f"{other}.")), None)

    def _has(self, name: str, what: str) -> bool:
        inside = (of for other, of in self.styles.items() if f"{other}.".startswith(f"{name}."))
        return any(getattr(style(of), what) for of in inside)

    def _holds_sum(self, name: str) -> bool:
        return any(of in _SUMS and self._within(other, (name,)) for other, of in self.styles.items())


def _unknown(reason: str) -> Forms:
    return Forms(reason, reason, reason)


def _is_attention(kind: type) -> bool:
    return fetches_attention_core(kind) or computes_own_attention(kind)


def change_input(args: tuple, kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[tuple, dict[str, Any]]:
    """Applies `change` to the hidden states of a call: the first positional argument, or `hidden_states=`."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get(HIDDEN_STATES), Tensor):
        return args, {**kwargs, HIDDEN_STATES: change(kwargs[HIDDEN_STATES])}
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise UnsupportedError("A module with a forward hook was called without hidden states as its first argument.")
    return args, kwargs


def change_output(output: Any, first: Callable[[Any], Any], maps: Callable[[Any], Any] | None) -> Any:
    """Applies `first` to what a module returns, or to the first entry of it, and `maps` to later ones of four dims."""
    if not isinstance(output, tuple):
        return first(output)
    rest = [maps(v) if maps is not None and isinstance(v, Tensor) and v.dim() == 4 else v for v in output[1:]]
    return (first(output[0]), *rest)

"""Blocks of which each rank computes some heads with its part of whole weights: state space mixers (Megatron's too).

    x --copy_to_ranks--> block with the weights of some heads --reduce_from_ranks--> x

Some weights are blocks of unequal sizes side by side, of each of which a rank needs some rows: at rest ranks have equal
pieces of such a weight, which they join for a forward and whose gradients they add up and share out again. A norm over
all heads together divides by the mean of all ranks' squares, one number for each token; a narrow projection that reads
all heads is summed. Where all heads read one group, every rank has it, and a norm of that group sees the features of
all ranks, which are gathered for it.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.shard_safe import shard_safe
from ..compat.shared import Shared
from ..core.communication.collectives import copy_to_ranks, gather_from_ranks, reduce_from_ranks, split_over_ranks
from ..core.communication.mean_grad_ops import sum_over_ranks
from ..core.communication.rng import TensorParallelRng
from ..errors import UnsupportedError
from ..models.spec import HeadBlock, Width
from .attention_heads import norm_of_all_ranks
from .local_parameters import is_split_parameter

_ABSENT = object()
# What holds counts beside a block's modules.
_CONFIG = "config"


def is_adapted(block: nn.Module) -> bool:
    """Tells whether PEFT has put adapters around modules of a block."""
    return any(_BASE in module._modules for module in block.modules())


def _outer_modules(block: nn.Module, parameter: str) -> Iterator[nn.Module]:
    path = parameter.split(".")[:-1]
    return (block.get_submodule(".".join(path[: depth + 1])) for depth in range(len(path)))


def has_heads_of(block: nn.Module, heads: HeadBlock) -> bool:
    """Tells whether a block has what is counted: patterns may meet blocks of other kinds in other layers."""
    return all(count.partition(".")[0] in (*vars(block), *block._modules) for count in heads.counts)


def is_one_group(block: nn.Module, heads: HeadBlock) -> bool:
    """Tells whether all heads of a block read the same group."""
    return heads.groups is not None and attrgetter(heads.groups)(block) == 1


def divides(block: nn.Module, heads: HeadBlock, ranks: int, *, takes_one_group: bool = False) -> bool:
    """Tells whether ranks can have equal numbers of a block's heads, and of the groups that these read.

    Args:
        takes_one_group (`bool`): one group may be all ranks'.
    """
    counts = set(heads.counts) - ({heads.groups} if takes_one_group and is_one_group(block, heads) else set())
    return not any(attrgetter(count)(block) % (ranks * heads.interleave_rounds) for count in counts)


# What PEFT's layers hold in the place of which they stand.
_BASE = "base_layer"
# Of which a rank has at rest what its heads read.
_CUT_AT_REST = ("shard_dim_0", "shard_dim_1", "shard_dim_2", "packed_dim_0")
# Of which a rank has a piece at rest that is none of a head's, by the dim of heads.
_JOINED = ("gathered_dim_0", "gathered_dim_1")


@dataclass(frozen=True)
class _Cut:
    """How a weight is made of parts with entries for every head.

    Attributes:
        sizes: of the parts along `dim`; none where there is one.
        stays: which of them are read by all heads.
    """

    dim: int
    sizes: list[int]
    stays: list[bool]

    @classmethod
    def of(cls, block: nn.Module, heads: HeadBlock, name: str) -> "_Cut":
        dim, widths = heads.weights[name]
        is_one = is_one_group(block, heads)
        sizes = [_width(block, width) // heads.interleave_rounds for width in widths]
        stays = [is_one and heads.groups in of for of in widths]
        return cls(dim, sizes * heads.interleave_rounds, stays * heads.interleave_rounds)

    @property
    def style(self) -> str:
        """Returns how the weight lies at rest: as it is read, or in pieces that are joined before they are cut."""
        if len(self.sizes) < 2:
            return _CUT_AT_REST[self.dim]
        return "packed_dim_0" if self.dim == 0 and self.sizes == self.sizes[:1] * 2 else _JOINED[self.dim]


def styles_of_weights(block: nn.Module, heads: HeadBlock) -> dict[str, str]:
    """Maps the parameters of a block that have entries for heads to styles; norms of gathered features stay whole."""
    gathered = heads.norms_of_groups if is_one_group(block, heads) else ()
    names = {name for name, _ in block.named_parameters()} & heads.weights.keys()
    return {name: _Cut.of(block, heads, name).style for name in names if name.rpartition(".")[0] not in gathered}


class HeadsOfRank:
    """Puts the weights and counts of this rank's heads into a block while it computes.

    Args:
        heads (`HeadBlock`): how the block's weights are cut.
        group (`ProcessGroup`): of the ranks that share its heads.
    """

    def __init__(self, heads: HeadBlock, group: dist.ProcessGroup):
        self.heads, self.group = heads, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def take(self, block: nn.Module) -> None:
        # A forward before may have failed.
        self.give_back()
        is_one = is_one_group(block, self.heads)
        gathered = set(self.heads.norms_of_groups) if is_one else set()
        # Of the parameters of all heads, before the first is replaced.
        cuts = {name: _Cut.of(block, self.heads, name) for name in self.heads.weights}
        lengths: dict[str, int] = {}
        for name, cut in cuts.items():
            if name.rpartition(".")[0] in gathered:
                continue
            for held, own, weight in _held(block, name):
                part = self._part(cut, held[own], weight)
                self._replace(held, own, part)
                lengths[name] = part.shape[cut.dim]
        for name in self.heads.summed:
            for held, own, weight in _held(block, name):
                self._replace(held, own, weight / self.ranks)
        if any(count.startswith(f"{_CONFIG}.") for count in self.heads.counts):
            # All layers have the same one.
            self._replace(vars(block), "config", copy.copy(block.config))
        for count in self.heads.counts:
            if is_one and count == self.heads.groups:
                continue
            owner, own = _owner(block, count)
            self._replace(vars(owner), own, getattr(owner, own) // self.ranks)
        for count, name in self.heads.lengths.items():
            owner, own = _owner(block, count)
            self._replace(vars(owner), own, lengths[name])
        for name in self.heads.norms:
            norm = block.get_submodule(name)
            self._replace(vars(norm), "forward", norm_of_all_ranks(norm, self.group))
        for name in gathered & dict(block.named_modules()).keys():
            norm = block.get_submodule(name)
            self._replace(vars(norm), "forward", _of_gathered(norm.forward, self.group))
        for name in self.heads.all_head_linears:
            linear: Any = block.get_submodule(name)
            self._replace(vars(linear), "forward", product_of_all_ranks(linear.weight, self.group))
            # A kernel that read it would not sum what it makes of it.
            self._replace(linear._parameters, "weight", None)

    def accept_full(self, block: nn.Module) -> None:
        """Puts the weights of all heads into a block with adapters.

        Raises `UnsupportedError` for trained weights beside adapters.
        """
        self.give_back()
        for name, parameter in list(block.named_parameters()):
            owner, own = _owner(block, name)
            is_of_adapter = _BASE not in name.split(".") and any(
                _BASE in outer._modules for outer in _outer_modules(block, name)
            )
            if is_of_adapter:
                continue
            if parameter.requires_grad:
                own_name = name.replace(f"{_BASE}.", "")
                raise UnsupportedError(
                    f"{own_name} of a {type(block).__name__}: with tp_size > 1 its heads are shared out, and beside "
                    "PEFT adapters inside of it no weight of its own is trained. Freeze it, leave the block out of "
                    "target_modules and modules_to_save, or load the model with tp_size=1."
                )
            unsharded = parameter.detach()
            self._replace(
                owner._parameters, own, unsharded.full_tensor() if isinstance(unsharded, DTensor) else unsharded
            )

    def _part(self, cut: "_Cut", parameter: Tensor, weight: Tensor) -> Tensor:
        """Returns this rank's part of a weight, as forwards read it: whole, or what of it the rank has at rest."""
        is_split = is_split_parameter(parameter)
        if is_split and cut.style in _CUT_AT_REST:
            return weight
        if is_split:
            weight = gather_from_ranks(weight, cut.dim, parameter.shape[cut.dim], self.group, sum_gradient=True)
        sizes = cut.sizes or [weight.shape[cut.dim]]
        parts = [
            part if stays else part.chunk(self.ranks, cut.dim)[self.rank]
            for part, stays in zip(weight.split(sizes, cut.dim), cut.stays or [False], strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)

    def _replace(self, held: dict[str, Any], own: str, value: Any) -> None:
        """Puts a value in the place of one that a module holds, and notes what to give back."""
        self._replaced.append((held, own, held.get(own, _ABSENT)))
        held[own] = value

    def give_back(self) -> None:
        for held, own, value in reversed(self._replaced):
            if value is _ABSENT:
                del held[own]
            else:
                held[own] = value
        self._replaced = []


class PartialHeads(Shared):
    """The hooks of such a block: its inputs are copied, its output `[batch, sequence, hidden]` is summed.

    With adapters inside, whose factors know nothing of heads, every rank computes all of it with frozen weights.
    """

    def __init__(self, heads: HeadBlock, group: dist.ProcessGroup, streams: TensorParallelRng):
        self.group, self.streams = group, streams
        self.own = HeadsOfRank(heads, group)
        self._is_replicated = False

    def install(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        # Recomputation ends in the middle of a forward, by an exception.
        block.register_forward_hook(self._leave, always_call=True)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return copy_to_ranks(value, self.group)
        return value

    @shard_safe
    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self._is_replicated = is_adapted(block)
        if self._is_replicated:
            self.own.accept_full(block)
            return None
        self.own.take(block)
        return tuple(map(self._copy, args)), {name: self._copy(value) for name, value in kwargs.items()}

    @shard_safe
    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        self.own.give_back()
        if self._is_replicated or output is None:
            return output
        self.streams.use_shared_rng()
        if isinstance(output, Tensor):
            return reduce_from_ranks(output, self.group)
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            return (reduce_from_ranks(output[0], self.group), *output[1:])
        raise UnsupportedError(f"{type(block).__name__} returned {type(output).__name__}, expected a tensor first.")


def product_of_all_ranks(weight: Tensor, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a linear whose input features lie on several ranks, and whose output on each."""
    return lambda features: sum_over_ranks(F.linear(features, weight), group)


def _of_gathered(norm: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Returns the forward of a norm that sees the features of all ranks, of which each keeps its own.

    All ranks compute the same: the weight's gradient is complete on each.
    """

    def gathered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return gather_from_ranks(value, -1, value.shape[-1] * dist.get_world_size(group), group)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        output = norm(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
        return split_over_ranks(output, output.dim() - 1, group)

    return forward


def _owner(block: nn.Module, name: str) -> tuple[Any, str]:
    path, _, own = name.rpartition(".")
    return block.config if path == _CONFIG else block.get_submodule(path), own


def _held(block: nn.Module, name: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields what holds a parameter or buffer of a block with it as forwards read it, if the block has it."""
    owner, own = _owner(block, name)
    for held in (owner._parameters, owner._buffers):
        if held.get(own) is not None:
            yield held, own, getattr(owner, own)


def _width(block: nn.Module, width: Width) -> int:
    return math.prod(attrgetter(count)(block) for count in width)

"""Head-sharded blocks: each rank computes some heads with slices of the block's weights (state space mixers).

    x --copy_to_ranks--> block with the weights of some heads --reduce_from_ranks--> x

Megatron shards its mixers the same way. Some weights concatenate blocks of unequal sizes, and a rank needs some rows of
each: at rest the ranks hold equal shards of such a weight, which are all-gathered for a forward and whose gradients are
reduce-scattered. A norm over all heads divides by the mean of all ranks' squares, one value per token; the output of a
narrow projection that reads all heads is all-reduced. If all heads read a single group, every rank holds that group,
and a norm of it needs the features of all ranks, which are all-gathered for it.
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
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError
from ..models.spec import HeadBlock, Width
from .attention_heads import make_sharded_norm
from .local_parameters import is_split_parameter

_ABSENT = object()
# Owner of counts outside of a block's modules.
_CONFIG = "config"


def is_adapted(block: nn.Module) -> bool:
    """Returns whether PEFT adapters wrap modules of a block."""
    return any(_BASE in module._modules for module in block.modules())


def _outer_modules(block: nn.Module, parameter: str) -> Iterator[nn.Module]:
    path = parameter.split(".")[:-1]
    return (block.get_submodule(".".join(path[: depth + 1])) for depth in range(len(path)))


def has_counted_heads(block: nn.Module, heads: HeadBlock) -> bool:
    """Returns whether a block has the counted attributes; patterns may match blocks of other kinds in other layers."""
    return all(count.partition(".")[0] in (*vars(block), *block._modules) for count in heads.counts)


def is_one_group(block: nn.Module, heads: HeadBlock) -> bool:
    """Returns whether all heads of a block read the same group."""
    return heads.groups is not None and attrgetter(heads.groups)(block) == 1


def divides(block: nn.Module, heads: HeadBlock, ranks: int, *, takes_one_group: bool = False) -> bool:
    """Returns whether the ranks can have equal numbers of a block's heads, and of the groups that these read.

    Args:
        takes_one_group (`bool`): allow a single group that all ranks hold.
    """
    counts = set(heads.counts) - ({heads.groups} if takes_one_group and is_one_group(block, heads) else set())
    return not any(attrgetter(count)(block) % (ranks * heads.interleave_rounds) for count in counts)


# Name of the wrapped module in PEFT's layers.
_BASE = "base_layer"
# Styles of weights that are sharded at rest as their heads read them.
_CUT_AT_REST = ("shard_dim_0", "shard_dim_1", "shard_dim_2", "packed_dim_0")
# Styles, by the dim of heads, of weights that are gathered before heads are cut: shards at rest ignore heads.
_JOINED = ("gathered_dim_0", "gathered_dim_1")


@dataclass(frozen=True)
class _Cut:
    """Composition of a weight from blocks with entries for every head.

    Attributes:
        sizes: of the blocks along `dim`; empty if there is only one.
        stays: which of them are read by all heads and therefore not cut.
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
        """Style of the weight at rest: sharded as heads read it, or in equal shards, gathered before it is cut."""
        if len(self.sizes) < 2:
            return _CUT_AT_REST[self.dim]
        return "packed_dim_0" if self.dim == 0 and self.sizes == self.sizes[:1] * 2 else _JOINED[self.dim]


def plan_head_weights(block: nn.Module, heads: HeadBlock) -> dict[str, str]:
    """Maps a block's per-head parameters to styles; norms of gathered features are left out (replicated)."""
    gathered = heads.norms_of_groups if is_one_group(block, heads) else ()
    names = {name for name, _ in block.named_parameters()} & heads.weights.keys()
    return {name: _Cut.of(block, heads, name).style for name in names if name.rpartition(".")[0] not in gathered}


class HeadsOfRank:
    """Swaps the weights and counts of this rank's heads into a block while it computes.

    Args:
        heads (`HeadBlock`): how the block's weights are cut.
        group (`ProcessGroup`): the ranks that share the block's heads.
    """

    def __init__(self, heads: HeadBlock, group: dist.ProcessGroup):
        self.heads, self.group = heads, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def take(self, block: nn.Module) -> None:
        # A previous forward may have failed before it restored the block.
        self.give_back()
        is_one = is_one_group(block, self.heads)
        gathered = set(self.heads.norms_of_groups) if is_one else set()
        # Read the counts of all heads before the first of them is replaced.
        cuts = {name: _Cut.of(block, self.heads, name) for name in self.heads.weights}
        lengths: dict[str, int] = {}
        for name, cut in cuts.items():
            if name.rpartition(".")[0] in gathered:
                continue
            for held, attr_name, weight in _held(block, name):
                # This rank's heads: [all entries] -> [local entries] along `cut.dim`.
                part = self._part(cut, held[attr_name], weight)
                self._replace(held, attr_name, part)
                lengths[name] = part.shape[cut.dim]
        # Parameters that every rank adds to a partial sum: each adds its share.
        for name in self.heads.summed:
            for held, attr_name, weight in _held(block, name):
                self._replace(held, attr_name, weight / self.ranks)
        if any(count.startswith(f"{_CONFIG}.") for count in self.heads.counts):
            # All layers share one config: replace it in this block only.
            self._replace(vars(block), "config", copy.copy(block.config))
        for count in self.heads.counts:
            if is_one and count == self.heads.groups:
                continue
            owner, attr_name = _owner(block, count)
            self._replace(vars(owner), attr_name, getattr(owner, attr_name) // self.ranks)
        for count, name in self.heads.lengths.items():
            owner, attr_name = _owner(block, count)
            self._replace(vars(owner), attr_name, lengths[name])
        for name in self.heads.norms:
            norm = block.get_submodule(name)
            self._replace(vars(norm), "forward", make_sharded_norm(norm, self.group))
        for name in gathered & dict(block.named_modules()).keys():
            norm = block.get_submodule(name)
            self._replace(vars(norm), "forward", _make_gathered_norm(norm.forward, self.group))
        for name in self.heads.all_head_linears:
            linear: Any = block.get_submodule(name)
            self._replace(vars(linear), "forward", make_reduced_linear(linear.weight, self.group))
            # The weight is hidden from fused kernels: they would read it and skip the all-reduce.
            self._replace(linear._parameters, "weight", None)

    def accept_full(self, block: nn.Module) -> None:
        """Swaps the weights of all heads into a block with adapters.

        Raises `UnsupportedError` for trainable base weights next to adapters.
        """
        self.give_back()
        for name, parameter in list(block.named_parameters()):
            owner, attr_name = _owner(block, name)
            is_of_adapter = _BASE not in name.split(".") and any(
                _BASE in outer._modules for outer in _outer_modules(block, name)
            )
            if is_of_adapter:
                continue
            if parameter.requires_grad:
                own_name = name.replace(f"{_BASE}.", "")
                raise UnsupportedError(
                    f"{own_name} of a {type(block).__name__} is trainable: with tp_size > 1, the base weights of a "
                    "head-sharded block with PEFT adapters have to be frozen. Freeze it, exclude the block from "
                    "target_modules and modules_to_save, or load the model with tp_size=1."
                )
            weight = parameter.detach()
            self._replace(owner._parameters, attr_name, weight.full_tensor() if isinstance(weight, DTensor) else weight)

    def _part(self, cut: "_Cut", parameter: Tensor, weight: Tensor) -> Tensor:
        """Returns this rank's slice of `weight`, the full or at-rest sharded tensor that forwards read."""
        is_split = is_split_parameter(parameter)
        if is_split and cut.style in _CUT_AT_REST:
            return weight
        if is_split:
            # Unequal blocks: gather the full weight, then cut each block by heads. In backward the gather's gradient is
            # reduce-scattered, since each rank has a partial one.
            weight = gather_from_ranks(weight, cut.dim, parameter.shape[cut.dim], self.group, sum_gradient=True)
        sizes = cut.sizes or [weight.shape[cut.dim]]
        parts = [
            # Blocks that all heads read stay full; of the others the rank keeps its chunk.
            part if stays else part.chunk(self.ranks, cut.dim)[self.rank]
            for part, stays in zip(weight.split(sizes, cut.dim), cut.stays or [False], strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)

    def _replace(self, held: dict[str, Any], attr_name: str, value: Any) -> None:
        """Replaces a value that a module holds, and records the old one for `give_back`."""
        self._replaced.append((held, attr_name, held.get(attr_name, _ABSENT)))
        held[attr_name] = value

    def give_back(self) -> None:
        for held, attr_name, value in reversed(self._replaced):
            if value is _ABSENT:
                del held[attr_name]
            else:
                held[attr_name] = value
        self._replaced = []


class PartialHeads(Shared):
    """Hooks of a head-sharded block: inputs are copied, the output `[batch, sequence, hidden]` is all-reduced.

    LoRA factors have no head structure: with adapters inside, every rank computes the full block with frozen weights.
    """

    def __init__(self, heads: HeadBlock, group: dist.ProcessGroup, rng: TensorParallelRng):
        self.group, self.rng = group, rng
        self.own = HeadsOfRank(heads, group)
        self._is_replicated = False

    def install(self, block: nn.Module, hooks: ForwardHooks) -> None:
        # Recomputation stops in the middle of a forward by raising, so the block is restored in any case.
        hooks.add_to(block, "partial heads", self._enter, self._leave, always_exit=True)

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
        self.rng.use_shared_rng()
        if isinstance(output, Tensor):
            # [batch, sequence, hidden]: partial sum over this rank's heads.
            return reduce_from_ranks(output, self.group)
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            return (reduce_from_ranks(output[0], self.group), *output[1:])
        raise UnsupportedError(
            f"{type(block).__name__} returned {type(output).__name__}, expected a tensor or a tuple starting with one."
        )


def make_reduced_linear(weight: Tensor, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of a linear with input features split over the ranks and a replicated output."""
    # [..., local features] x [out, local features] -> [..., out], all-reduced.
    return lambda features: sum_over_ranks(F.linear(features, weight), group)


def _make_gathered_norm(norm: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Returns the forward of a norm over the features of all ranks that keeps this rank's slice of the result.

    All ranks compute the same: the weight's gradient is complete on each.
    """

    def gathered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # [..., local features] -> [..., all features]
        return gather_from_ranks(value, -1, value.shape[-1] * dist.get_world_size(group), group)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        output = norm(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
        # [..., all features] -> [..., local features]
        return split_over_ranks(output, output.dim() - 1, group)

    return forward


def _owner(block: nn.Module, name: str) -> tuple[Any, str]:
    path, _, attr_name = name.rpartition(".")
    return block.config if path == _CONFIG else block.get_submodule(path), attr_name


def _held(block: nn.Module, name: str) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields the dict that holds a parameter or buffer, its key, and the tensor as forwards read it, if it exists."""
    owner, attr_name = _owner(block, name)
    for held in (owner._parameters, owner._buffers):
        if held.get(attr_name) is not None:
            yield held, attr_name, getattr(owner, attr_name)


def _width(block: nn.Module, width: Width) -> int:
    return math.prod(attrgetter(count)(block) for count in width)

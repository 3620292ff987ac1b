"""Blocks on whole rows of which each rank computes some heads (Megatron's Mamba context parallel).

    x/cp --gather--> block with the weights of some heads, on the whole row --sum, own tokens--> x/cp

A rank has all weights and computes with its heads' part of them, so that a block's compute is shared out whatever its
tokens do among each other. Gradients of the other heads' weights are zeros, and those of all ranks add up.
"""

from typing import Any

from torch import Tensor, nn

from ..compat.shard_safe import shard_safe
from ..core.axes import Axes
from ..core.placement import ParameterSharding
from ..models.spec import HeadBlock, generic
from ..parallel_state import ParallelState
from ..tensor_parallel.head_sharded_blocks import HeadsOfRank, divides
from .full_sequence_blocks import FullSequenceBlock
from .sequence_split import ContextStack
from .token_exchange import scatter_tokens

_TOKENS = 1


def heads_to_share(block: nn.Module, name: str, state: ParallelState) -> HeadBlock | None:
    """Returns how a block's heads are shared out over the ranks of a row; `None` where they are not."""
    known = state.spec.cp.head_sharded_blocks.get(generic(name))
    if known is None or not divides(block, known, state.axes.size("cp")):
        return None
    # Weights of which tp ranks have parts, or parts of the gradient, are cut with no regard to heads.
    parts = {generic(weight) for weight, sharding in state.shardings.items() if _has_parts(sharding, state.axes)}
    return None if any(generic(f"{name}.{own}") in parts for own, _ in block.named_parameters()) else known


def _has_parts(sharding: ParameterSharding, axes: Axes) -> bool:
    return sharding.placement.on(axes).is_split or sharding.gradient.sum is not None


class SharedHeadBlock(FullSequenceBlock):
    """The hooks around one block, and the heads of this rank while it computes.

    Args:
        name (`str`): of the block.
        heads (`HeadBlock`): how its weights are cut.
    """

    def __init__(self, stack: ContextStack, name: str, heads: HeadBlock):
        super().__init__(stack, name)
        self._own = HeadsOfRank(heads, stack.group)

    @shard_safe
    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        entered = super()._enter(block, args, kwargs)
        if entered is not None:
            self._own.take(block)
        return entered

    @shard_safe
    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        self._own.give_back()
        return super()._leave(block, args, output)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        row = self.stack.row
        assert row is not None
        return scatter_tokens(hidden, _TOKENS, row.order, self.stack.group)

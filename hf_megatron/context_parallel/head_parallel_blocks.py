"""Blocks on full sequences in which each rank computes some heads (Megatron's Mamba context parallelism).

    x/cp --gather--> block with the weights of some heads, on the full sequence --reduce-scatter--> x/cp

A rank holds all weights and computes with the slices of its heads, which splits the block's compute however it mixes
tokens. The gradients of the other heads' weights are zero; the sum over ranks is complete.
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
    """Returns the head layout of a block whose heads can be split over the cp ranks, or `None`."""
    known = state.spec.cp.head_sharded_blocks.get(generic(name))
    if known is None or not divides(block, known, state.axes.size("cp")):
        return None
    # Weights that are sharded over tp, or have partial gradients, are split without regard to heads.
    parts = {generic(weight) for weight, sharding in state.shardings.items() if _has_parts(sharding, state.axes)}
    return (
        None if any(generic(f"{name}.{param_name}") in parts for param_name, _ in block.named_parameters()) else known
    )


def _has_parts(sharding: ParameterSharding, axes: Axes) -> bool:
    return sharding.placement.on(axes).is_split or sharding.gradient.sum is not None


class SharedHeadBlock(FullSequenceBlock):
    """Hooks around one block, which also select this rank's heads while it computes.

    Args:
        name (`str`): of the block.
        heads (`HeadBlock`): how its weights are cut.
    """

    def __init__(self, stack: ContextStack, name: str, heads: HeadBlock):
        super().__init__(stack, name)
        self._own = HeadsOfRank(heads, stack.group)

    @shard_safe
    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        # [batch, local, hidden] -> [batch, length, hidden], then computed with the weights of this rank's heads.
        entered = super()._enter(block, args, kwargs)
        if entered is not None:
            self._own.take(block)
        return entered

    @shard_safe
    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        self._own.give_back()
        return super()._leave(block, args, output)

    def own_tokens(self, hidden: Tensor) -> Tensor:
        layout = self.stack.token_layout
        assert layout is not None
        # Each rank's heads give a partial sum: [batch, length, hidden] -> reduce-scatter -> [batch, local, hidden].
        return scatter_tokens(hidden, _TOKENS, layout.order, self.stack.group)

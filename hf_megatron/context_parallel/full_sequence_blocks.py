"""Blocks that mix tokens outside of transformers' attention functions: computed on full sequences.

    x/cp --gather--> block, with mask, positions and arguments of the full sequence --own tokens--> x/cp

Every rank computes the complete block: correct for any block, but not faster. Each rank's weight gradients come from
its own tokens of the output, so they accumulate like all other gradients.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from ..compat.shard_safe import shard_safe
from ..compat.shared import Shared
from ..core.forward_hooks import ForwardHooks
from ..tensor_parallel.region import UniformRegion
from .local_tokens import mapped
from .mask_specs import ContextMask
from .sequence_split import ContextStack
from .token_exchange import gather_tokens, take_tokens

_TOKENS = 1


class FullSequenceBlock(Shared):
    """Hooks around one block.

    Args:
        name (`str`): of the block.
        region (`UniformRegion`, *optional*): of a block whose row-parallel linear splits the sequence over tp: the
            region then keeps this rank's tokens, before its reduce-scatter.
    """

    def __init__(self, stack: ContextStack, name: str, region: UniformRegion | None = None):
        self.stack, self.name = stack, name
        self.is_split = region is not None and region.stack is not None
        if region is not None:
            region.select_tokens = self._take_own_tokens

    def install(self, block: nn.Module, hooks: ForwardHooks) -> None:
        self.names = tuple(inspect.signature(block.forward).parameters)
        # Inner hooks: sequence parallelism gathers the inputs before them and splits the outputs after them.
        hooks.add_to(block, "full-sequence block", self._enter, self._leave, always_exit=True)

    @shard_safe
    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        stack, layout = self.stack, self.stack.token_layout
        if layout is None or not stack.has_parts:
            return None
        stack.full_sequence_blocks.append(self.name)
        # Local tokens: [batch, local, hidden].
        hidden = args[0] if args else kwargs[self.names[0]]

        def to_full_sequence(name: str, value: Any) -> Any:
            if isinstance(value, ContextMask):
                return value.dense
            if type(value) is dict:
                # Masks of several kinds, as in ZAYA's layers.
                return {kind: to_full_sequence(name, part) for kind, part in value.items()}
            # A block that adds to the residual stream gets it as a further argument. In short sequences other tensors
            # may have the same shape; they were sliced by `layout.own`, which keeps their full version.
            is_hidden = isinstance(value, Tensor) and value.is_floating_point() and value.shape == hidden.shape
            if is_hidden and layout.unsharded(value) is value:
                # [batch, local, hidden] -> [batch, length, hidden]; the backward reduce-scatters the gradient.
                return gather_tokens(value, _TOKENS, layout.order, stack.group)
            return mapped(value, layout.unsharded)

        args = tuple(to_full_sequence(name, value) for name, value in zip(self.names, args, strict=False))
        return args, {name: to_full_sequence(name, value) for name, value in kwargs.items()}

    @shard_safe
    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        stack, layout = self.stack, self.stack.token_layout
        if layout is None or self.name not in stack.full_sequence_blocks:
            return None
        stack.full_sequence_blocks.remove(self.name)
        if output is None:
            # The block has raised.
            return None
        # The region of the block has kept this rank's tokens already.
        if self.is_split:
            return None
        # Further outputs go to such blocks in later layers, on full sequences.
        return self.own_tokens(output) if isinstance(output, Tensor) else (self.own_tokens(output[0]), *output[1:])

    def _take_own_tokens(self, partial_output: Tensor) -> Tensor:
        return self.own_tokens(partial_output) if self.name in self.stack.full_sequence_blocks else partial_output

    def own_tokens(self, hidden: Tensor) -> Tensor:
        """Returns this rank's tokens of the block's output: `[batch, length, hidden]` -> `[batch, local, hidden]`."""
        assert self.stack.token_layout is not None
        return take_tokens(hidden, _TOKENS, self.stack.token_layout.order, self.stack.groups.rank)

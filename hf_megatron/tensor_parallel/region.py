"""Where activations change hands: the entry and exit of sharded blocks, with and without sequence parallelism.

Tensor parallel, one block (attention or MLP), `x` is replicated:

    x --copy_to_ranks--> column linears -> row linear --reduce_from_ranks--> x

Sequence parallel, the residual stream between blocks is split along the sequence:

    x/tp --gather_from_ranks--> column linears -> row linear --reduce_scatter_to_ranks--> x/tp

A block is *uniform* when only column linears read its input and one row linear makes its output; its collectives are
then fused at the entry and in the row linear. Any other block (router, latent projections, state space mixers) is
computed on the whole sequence as without sequence parallelism: gathered at its entry and cut at its exit.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.communication.collectives import (
    bounds,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    reduce_scatter_to_ranks,
    split_over_ranks,
)
from ..core.communication.rng import TensorParallelRng
from ..core.memory.gqa_saved_kv import keep_heads_once
from ..core.memory.recomputed_activations import recomputed_for
from ..core.memory.saved_tensor_hooks import may_pack
from ..errors import UnsupportedError
from .gathered_input import GatheredInput, GatheredInputs
from .hidden_states import replace_input, replace_output
from .per_token_arguments import replace_arguments

SEQUENCE_DIM = 1


class _RestoreLength(torch.autograd.Function):
    """Identity at the end of a layer stack whose backward tells the stack which batch it is replaying.

    It runs before any layer of its graph is recomputed, so gradient checkpointing sees the right shape also when
    another forward came in between.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stack: "SequenceStack") -> Tensor:
        ctx.stack, ctx.shape = stack, (stack.batch, stack.length)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stack.batch, ctx.stack.length = ctx.shape
        return gradient, None


@dataclass
class SequenceStack(Shared):
    """One stack of layers whose residual stream is split over the group along the sequence.

    Attributes:
        may_leave_out: whether a loop leaves out layers at random: each splits and joins the sequence by itself then.
    """

    group: dist.ProcessGroup
    may_leave_out: bool = False
    batch: int = 0
    length: int = 0
    is_inside: bool = False
    sequence_dim: int = SEQUENCE_DIM
    streams_lead: bool = False

    def dim_of_tokens(self, tensor: Tensor) -> int:
        """Returns which dim of a tensor has its tokens: in what layers hand on, streams may stand before the rows."""
        return self.sequence_dim + (self.streams_lead and tensor.dim() == 4)

    def install(self, layers: nn.ModuleList, full_prefix: tuple[int, ...] = ()) -> None:
        for first in range(len(layers)) if self.may_leave_out else {0, *full_prefix}:
            layers[first].register_forward_pre_hook(self._enter, with_kwargs=True)
            layers[first - 1].register_forward_hook(self._leave)  # For 0 it is the last of all.

    def require_ends(self, layers: nn.ModuleList, name: str) -> None:
        """Raises `UnsupportedError` where other layers stand at the ends of the stack now."""
        hooks = [*layers[0]._forward_pre_hooks.values()], [*layers[-1]._forward_hooks.values()]
        if not all(any(getattr(hook, "__self__", None) is self for hook in ends) for ends in hooks):
            raise UnsupportedError(
                f"The first or last layer of {name} was removed or exchanged: with sequence_parallel=True they split "
                "and join the sequence. Save the changed model from one process and load that, or set "
                "sequence_parallel=False."
            )

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        return replace_input(module, args, kwargs, self.split, of_block=False)

    def split(self, hidden_states: Tensor) -> Tensor:
        """Returns this rank's part of what the first layer is called with, `[batch, sequence, hidden]`."""
        dim = self.dim_of_tokens(hidden_states)
        # Rows stand beside tokens, on the one side or the other.
        self.batch = hidden_states.shape[dim + 1 - 2 * self.sequence_dim]
        self.is_inside, self.length = True, hidden_states.shape[dim]
        return split_over_ranks(hidden_states, dim, self.group)

    def join(self, hidden_states: Tensor) -> Tensor:
        """Returns the whole `[batch, sequence, hidden]` of the last layer's parts."""
        self.is_inside, unsharded = False, self._unsharded(hidden_states)
        # A compiled layer recomputes inside its own graph, whose shapes are fixed.
        return unsharded if torch.compiler.is_compiling() else _RestoreLength.apply(unsharded, self)

    def gather_token_outputs(self, part: Any) -> Any:
        """Joins what routers made of each token of this rank, `[batch * sequence / tp, experts]`; other things stay."""
        if not isinstance(part, Tensor) or part.dim() != 2:
            return part
        start, stop = bounds(self.length, dist.get_world_size(self.group), dist.get_rank(self.group))
        tokens = part.view(self.batch, stop - start, part.shape[1])
        return gather_from_ranks(tokens, SEQUENCE_DIM, self.length, self.group).flatten(0, 1)

    def on_full_sequence(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns a function of a loop that is handed whole hidden states between layers, `[batch, sequence, hidden]`.

        What it adds comes from outside of the stack, with the whole of its gradient on each rank.
        """

        @functools.wraps(function)
        def of_full(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self.is_inside:
                return function(hidden_states, *args, **kwargs)
            dim = self.dim_of_tokens(hidden_states)
            return split_over_ranks(function(self._unsharded(hidden_states), *args, **kwargs), dim, self.group)

        return of_full

    def replicated_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a loop that keeps whole hidden states between layers, its first argument."""

        @functools.wraps(function)
        def of_full(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return function(self._unsharded(hidden_states) if self.is_inside else hidden_states, *args, **kwargs)

        return of_full

    def _unsharded(self, hidden_states: Tensor) -> Tensor:
        return gather_from_ranks(hidden_states, self.dim_of_tokens(hidden_states), self.length, self.group)

    def leave_split(self, hidden_states: Tensor) -> Tensor:
        """Ends the part of a stack that a stage holds; `[batch, sequence / tp, hidden]` stays split."""
        if self.may_leave_out:
            return hidden_states
        self.is_inside = False
        return _RestoreLength.apply(hidden_states, self)

    def require_left(self, name: str) -> None:
        """Raises `UnsupportedError` where a forward has gone past the last layer."""
        if self.is_inside:
            self.is_inside = False
            raise UnsupportedError(
                f"The last layer of {name} was not called, as with another config.num_hidden_layers: with "
                "sequence_parallel=True it joins the sequence. Save the changed model from one process and load that, "
                "or set sequence_parallel=False."
            )

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return replace_output(output, self.join)


@dataclass
class UniformRegion(Shared):
    """A block whose input only column linears read and whose output one row linear makes.

    With `inputs` its linears keep shards and what can be computed again (`MegatronConfig.shard_saved_activations`).

    Attributes:
        is_inside: whether a forward is between its entry and the sum of its row linear.
        own_tokens (`Callable`, *optional*): with a split sequence, what is kept of `[batch, sequence, hidden]` before
            the ranks add up their parts of it.
    """

    group: dist.ProcessGroup
    streams: TensorParallelRng
    stack: SequenceStack | None = None
    inputs: GatheredInputs | None = None
    gathered: GatheredInput | None = None
    is_inside: bool = False
    own_tokens: Callable[[Tensor], Tensor] | None = None

    def install(self, block: nn.Module) -> None:
        block.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.streams.use_shared_rng()
        self.is_inside = True
        return replace_input(block, args, kwargs, self.enter)

    def enter(self, hidden_states: Tensor) -> Tensor:
        """Gives every rank the whole `[batch, sequence, hidden]`; its gradient is summed over the ranks."""
        if self.stack is None:
            return copy_to_ranks(hidden_states, self.group)
        if hidden_states.dim() == 2:
            return self.enter(self._unflatten(hidden_states)).flatten(0, 1)
        unsharded = gather_from_ranks(
            hidden_states, self.stack.sequence_dim, self.stack.length, self.group, sum_gradient=True
        )
        self.gathered = None
        if self.inputs is not None and may_pack():
            self.gathered = GatheredInput(self.inputs, hidden_states, unsharded)
        return unsharded

    def column_input(self, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
        """Returns what a column linear reads in place of `[..., hidden]`, and the context it computes in."""
        if self.gathered is None or not may_pack():
            return x, nullcontext()
        return self.gathered.saved_by(x)

    def row_input(self, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
        """Returns what the row linear reads in place of `[..., width / tp]`, and the context it computes in."""
        if self.inputs is None or not may_pack():
            return x, nullcontext()
        keep_heads_once(x)
        return recomputed_for(x)

    def _unflatten(self, tokens: Tensor) -> Tensor:
        # Some layers hand `[batch * sequence, hidden]` to their linears; a rank may hold no token at all.
        assert self.stack is not None
        return tokens.view(self.stack.batch, tokens.shape[0] // self.stack.batch, tokens.shape[1])

    def leave(self, partial_output: Tensor) -> Tensor:
        """Sums the row linear's partial outputs `[batch, sequence, hidden]`."""
        self.gathered, self.is_inside = None, False
        if self.stack is None:
            self.streams.use_shared_rng()
            return reduce_from_ranks(partial_output, self.group)
        if partial_output.dim() == 2:
            return self.leave(self._unflatten(partial_output)).flatten(0, 1)
        if self.own_tokens is not None:
            partial_output = self.own_tokens(partial_output)
        return reduce_scatter_to_ranks(partial_output, self.stack.sequence_dim, self.group)


@dataclass
class FullSequenceRegion(Shared):
    """A block that every rank computes on the whole sequence, inside a sequence parallel stack.

    Attributes:
        further: names of further arguments of it with an entry per token, which are joined as its first one is.
    """

    stack: SequenceStack
    streams: TensorParallelRng
    further: tuple[str, ...] = ()

    def install(self, block: nn.Module) -> None:
        # Around what the block's own style does to its inputs.
        block.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        block.register_forward_hook(self._leave)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        def gather(hidden_states: Tensor) -> Tensor:
            if hidden_states.dim() < 3:
                raise UnsupportedError(
                    f"{type(block).__name__} was called with flattened tokens {tuple(hidden_states.shape)}, which "
                    "cannot be joined along the sequence. Set sequence_parallel=False."
                )
            return gather_from_ranks(hidden_states, self.stack.sequence_dim, self.stack.length, self.stack.group)

        self.streams.use_shared_rng()
        args, kwargs = replace_arguments(block, args, kwargs, dict.fromkeys(self.further, gather))
        return replace_input(block, args, kwargs, gather)

    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        def split(unsharded: Tensor) -> Tensor:
            if unsharded.dim() == 2:
                # A mixture of experts that leaves its tokens flattened: [batch * sequence, hidden].
                unsharded = unsharded.unflatten(0, (self.stack.batch, self.stack.length))
            return split_over_ranks(unsharded, self.stack.sequence_dim, self.stack.group)

        if block.training:
            self.streams.use_local_rng()
        return replace_output(output, split)

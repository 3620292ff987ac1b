"""Entry and exit of sharded blocks, where activations change their layout, with and without sequence parallelism.

Tensor parallel, one block (attention or MLP), `x` is replicated:

    x --copy_to_ranks--> column linears -> row linear --reduce_from_ranks--> x

Sequence parallel, the residual stream between blocks is sharded along the sequence:

    x/tp --gather_from_ranks--> column linears -> row linear --reduce_scatter_to_ranks--> x/tp

A block is *uniform* when only column-parallel linears read its input and one row-parallel linear computes its output;
its collectives run once, at the entry and in the row-parallel linear. Any other block (router, latent projections,
state space mixers) is computed on the full sequence as without sequence parallelism: gathered at its entry and split at
its exit.
"""

import functools
from collections.abc import Callable
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
from ..core.forward_hooks import ForwardHooks
from ..core.memory.gqa_saved_kv import keep_heads_once
from ..core.memory.recomputed_activations import run_recomputed
from ..core.memory.saved_tensor_hooks import may_pack
from ..errors import UnsupportedError
from .gathered_input import GatheredInput, GatheredInputs
from .hidden_states import replace_input, replace_output
from .per_token_arguments import replace_arguments
from .stack_ends import StackEnds

SEQUENCE_DIM = 1


class _RestoreLength(torch.autograd.Function):
    """Identity at the end of a layer stack; its backward restores the batch size and sequence length in the stack.

    It runs before any layer of its graph is recomputed, so gradient checkpointing uses the right shapes even if another
    forward ran in between.
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
    """Stack of layers whose residual stream is sharded over the group along the sequence.

    Attributes:
        has_layer_drop: whether the loop skips layers at random; every layer then splits and gathers the sequence.
    """

    group: dist.ProcessGroup
    has_layer_drop: bool = False
    batch: int = 0
    length: int = 0
    is_inside: bool = False
    sequence_dim: int = SEQUENCE_DIM
    residual_streams_first: bool = False

    def get_token_dim(self, tensor: Tensor) -> int:
        """Returns the token dim of a tensor; between layers a dim of hyper-connection streams may precede the batch."""
        return self.sequence_dim + (self.residual_streams_first and tensor.dim() == 4)

    def install(self, layers: nn.ModuleList, hooks: ForwardHooks, full_prefix: tuple[int, ...] = ()) -> None:
        # Split before the first layer and gather after the last one, or around each layer or recorded position.
        for first in range(len(layers)) if self.has_layer_drop else {0, *full_prefix}:
            hooks.add_to(layers[first], "sequence parallel stack", self._enter)
            # For 0 this is the last layer.
            hooks.add_to(layers[first - 1], "sequence parallel stack", exit=self._leave)

    def check_ends(self, around: nn.Module, model: nn.Module, name: str, hooks: ForwardHooks) -> None:
        """Checks before each forward that the layers split and gather the sequence, and after it that they did.

        Args:
            around: module of the model whose forward runs the layers.
            name (`str`): of the list of layers in the model.
        """
        StackEnds(
            self,
            name,
            splits=self._enter,
            gathers=self._leave,
            setting="sequence_parallel=True",
            off="sequence_parallel=False",
        ).install(around, model, hooks)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        return replace_input(module, args, kwargs, self.split, of_block=False)

    def split(self, hidden_states: Tensor) -> Tensor:
        """Splits the first layer's `[batch, sequence, hidden]` to this rank's `[batch, sequence / tp, hidden]`."""
        dim = self.get_token_dim(hidden_states)
        # The batch dim is next to the token dim: before it, or after it if the sequence comes first.
        self.batch = hidden_states.shape[dim + 1 - 2 * self.sequence_dim]
        # Kept for gathers inside the stack, where only the local shard is known.
        self.is_inside, self.length = True, hidden_states.shape[dim]
        # Backward: all-gather, since each rank has the gradient of its own tokens.
        return split_over_ranks(hidden_states, dim, self.group)

    def join(self, hidden_states: Tensor) -> Tensor:
        """Gathers the last layer's shards `[batch, sequence / tp, hidden]` to `[batch, sequence, hidden]`."""
        self.is_inside, unsharded = False, self._unsharded(hidden_states)
        # A compiled layer recomputes inside its own graph, whose shapes are fixed.
        return unsharded if torch.compiler.is_compiling() else _RestoreLength.apply(unsharded, self)

    def gather_token_outputs(self, part: Any) -> Any:
        """Gathers router outputs of local tokens, `[batch * sequence / tp, experts]`; returns other values as is."""
        if not isinstance(part, Tensor) or part.dim() != 2:
            return part
        # Batch-first: the only sequence-first model, XLNet, has no routers. The last rank may hold fewer tokens.
        start, stop = bounds(self.length, dist.get_world_size(self.group), dist.get_rank(self.group))
        tokens = part.view(self.batch, stop - start, part.shape[1])
        # [batch, local, experts] -> [batch, sequence, experts] -> [batch * sequence, experts]
        return gather_from_ranks(tokens, SEQUENCE_DIM, self.length, self.group).flatten(0, 1)

    def on_full_sequence(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps a function that the loop calls between layers, so that it gets full states `[batch, sequence, hidden]`.

        The value that it adds is computed outside of the stack, and gets its complete gradient on each rank.
        """

        @functools.wraps(function)
        def of_full(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self.is_inside:
                return function(hidden_states, *args, **kwargs)
            # [batch, sequence / tp, hidden] -> full sequence for the function -> [batch, sequence / tp, hidden]
            dim = self.get_token_dim(hidden_states)
            return split_over_ranks(function(self._unsharded(hidden_states), *args, **kwargs), dim, self.group)

        return of_full

    def with_gathered_states(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of the loop that records hidden states, its first argument, so that it gets full ones."""

        @functools.wraps(function)
        def of_full(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return function(self._unsharded(hidden_states) if self.is_inside else hidden_states, *args, **kwargs)

        return of_full

    def _unsharded(self, hidden_states: Tensor) -> Tensor:
        return gather_from_ranks(hidden_states, self.get_token_dim(hidden_states), self.length, self.group)

    def exit_without_gather(self, hidden_states: Tensor) -> Tensor:
        """Ends the local part of a stack on a pipeline stage; `[batch, sequence / tp, hidden]` stays sharded."""
        if self.has_layer_drop:
            return hidden_states
        self.is_inside = False
        return _RestoreLength.apply(hidden_states, self)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return replace_output(output, self.join)


@dataclass
class UniformRegion(Shared):
    """Attention or MLP block: column-parallel linears read its input, one row-parallel linear computes its output.

    Attributes:
        rng: shared while ranks compute the same values, local while they compute shards.
        stack (`SequenceStack`, *optional*): the stack around the block, if its sequence is sharded.
        inputs (`GatheredInputs`, *optional*): set if the block's linears save shards for backward, and recompute what
            can be recomputed (`MegatronConfig.shard_saved_activations`).
        gathered (`GatheredInput`, *optional*): the gathered input of the current forward, if the block's linears save
            it as a shard.
        unsharded (`Tensor`, *optional*): that input; the block's call refers to it as long as this region does.
        is_inside: whether a forward is between the block's entry and the reduction in its row-parallel linear.
        select_tokens (`Callable`, *optional*): with a sharded sequence, the tokens to keep of a partial output `[batch,
            sequence, hidden]` before it is reduce-scattered.
    """

    group: dist.ProcessGroup
    rng: TensorParallelRng
    stack: SequenceStack | None = None
    inputs: GatheredInputs | None = None
    gathered: GatheredInput | None = None
    unsharded: Tensor | None = None
    is_inside: bool = False
    select_tokens: Callable[[Tensor], Tensor] | None = None

    def install(self, block: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(block, "uniform region", self._enter)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        # Before the column-parallel linears all ranks hold the same values.
        if not self.rng.is_idle:
            self.rng.use_shared_rng()
        self.is_inside = True
        return replace_input(block, args, kwargs, self.enter)

    def enter(self, hidden_states: Tensor) -> Tensor:
        """Returns the full `[batch, sequence, hidden]` on every rank; its gradient is summed over the ranks."""
        if self.stack is None:
            # Already replicated: identity in the forward, all-reduce in the backward.
            return copy_to_ranks(hidden_states, self.group)
        if hidden_states.dim() == 2:
            return self.enter(self._unflatten(hidden_states)).flatten(0, 1)
        # All-gather [batch, sequence / tp, hidden] along the sequence. Each rank's heads or features yield a partial
        # gradient: reduce-scatter in the backward.
        unsharded = gather_from_ranks(
            hidden_states, self.stack.sequence_dim, self.stack.length, self.group, sum_gradient=True
        )
        self.gathered = self.unsharded = None
        # Kept as the shard only: column-parallel linears save a reference to it instead of the gathered tensor.
        if self.inputs is not None and may_pack():
            self.gathered, self.unsharded = GatheredInput(self.inputs, hidden_states, unsharded), unsharded
        return unsharded

    def run_row(self, matmul: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns `matmul(x)` of the row-parallel linear, from `[..., width / tp]`, and packs what is saved for it."""
        if self.inputs is None or torch.compiler.is_dynamo_compiling():
            return matmul(x)
        keep_heads_once(x)
        return run_recomputed(self.inputs.saved, matmul, x)

    def _unflatten(self, tokens: Tensor) -> Tensor:
        # Some layers pass `[batch * sequence, hidden]` to their linears, in batch-first models only; a rank may hold no
        # tokens at all.
        assert self.stack is not None
        return tokens.view(self.stack.batch, tokens.shape[0] // self.stack.batch, tokens.shape[1])

    def leave(self, partial_output: Tensor) -> Tensor:
        """Reduces the row-parallel linear's partial outputs `[batch, sequence, hidden]`, or reduce-scatters them."""
        self.gathered, self.unsharded, self.is_inside = None, None, False
        if self.stack is None:
            # All-reduce: [batch, sequence, hidden] replicated from here on, and random numbers shared.
            if not self.rng.is_idle:
                self.rng.use_shared_rng()
            return reduce_from_ranks(partial_output, self.group)
        if partial_output.dim() == 2:
            return self.leave(self._unflatten(partial_output)).flatten(0, 1)
        if self.select_tokens is not None:
            partial_output = self.select_tokens(partial_output)
        # Reduce-scatter: [batch, sequence, hidden] -> [batch, sequence / tp, hidden].
        return reduce_scatter_to_ranks(partial_output, self.stack.sequence_dim, self.group)


@dataclass
class FullSequenceRegion(Shared):
    """Block that every rank computes on the full sequence, inside a sequence parallel stack.

    Attributes:
        further: names of its further per-token arguments, which are gathered like the first one.
    """

    stack: SequenceStack
    rng: TensorParallelRng
    further: tuple[str, ...] = ()

    def install(self, block: nn.Module, hooks: ForwardHooks) -> None:
        # Outer hooks: those of the block's own style see gathered inputs.
        hooks.add_to(block, "full-sequence region", self._enter, self._leave)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        def gather(hidden_states: Tensor) -> Tensor:
            if hidden_states.dim() < 3:
                raise UnsupportedError(
                    f"{type(block).__name__} was called with flattened tokens {tuple(hidden_states.shape)}, which "
                    "cannot be gathered along the sequence. Set sequence_parallel=False."
                )
            # [batch, sequence / tp, hidden] -> [batch, sequence, hidden]. The gradient is complete on every rank (the
            # block computes the same everywhere, or its style sums it): split in the backward, no reduction.
            return gather_from_ranks(hidden_states, self.stack.sequence_dim, self.stack.length, self.stack.group)

        self.rng.use_shared_rng()
        args, kwargs = replace_arguments(block, args, kwargs, dict.fromkeys(self.further, gather))
        return replace_input(block, args, kwargs, gather)

    def _leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        def split(unsharded: Tensor) -> Tensor:
            if unsharded.dim() == 2:
                # MoE blocks may return flattened tokens: [batch * sequence, hidden]; their models are batch-first.
                unsharded = unsharded.unflatten(0, (self.stack.batch, self.stack.length))
            # [batch, sequence, hidden] -> [batch, sequence / tp, hidden]; all-gather in the backward.
            return split_over_ranks(unsharded, self.stack.sequence_dim, self.stack.group)

        if block.training:
            self.rng.use_local_rng()
        return replace_output(output, split)

"""Split of sequences before the first layer, and their gather after the last one or only after the loss.

    ids -> embeddings, positions, masks   full sequence on every rank
    first layer                           each rank takes its tokens
    layers                                on local tokens; attention sees all of them
    norm, head, loss of labels            on local tokens too, or
    last layer                            tokens are gathered: what follows sees full sequences

Parameter gradients are averaged over the cp ranks, as over data parallel ones. Computation that is identical on all
ranks has the single-process gradient on each. Where a rank computes its local tokens only, the backward of the gather
and of the sum passes it the sum of all ranks' gradients, so its gradient is cp_size times too large; the average
corrects this.

A call that reads or writes a cache, and a sequence of too few tokens, is computed in full on every rank.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.utils import ModelOutput

from ..compat.shared import Shared
from ..compat.torch_autograd import in_backward, leave_uncompiled
from ..compat.torch_modules import surround
from ..compat.transformers_models import CACHE_ARGUMENTS
from ..core.communication.rng import StreamOfPart
from ..core.forward_hooks import ForwardHooks
from ..core.runtime import RUNTIME
from ..errors import UnsupportedError
from ..tensor_parallel.install_regions import ROUTER_LOGITS
from ..tensor_parallel.stack_ends import StackEnds
from .attention import ContextGroups, TokenLayout
from .load_balancing import SequenceOrder
from .local_tokens import HeldTokens, mapped
from .mask_specs import ContextMask
from .modality_encoders import ModalityEncoders
from .token_exchange import gather_tokens, take_tokens

_TOKENS = 1


class _OfAllRanks(torch.autograd.Function):
    """Identity on an input that every rank gets; its gradient is averaged over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Each rank's gradient covers its local tokens only, cp_size times too large: the mean is complete.
        summed = gradient.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed / dist.get_world_size(ctx.group), None


class _RestoreRow(torch.autograd.Function):
    """Identity at the end of a stack whose backward restores the sequence that is recomputed.

    It runs before any layer of its graph is recomputed, also if another forward ran in between.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stack: "ContextStack") -> Tensor:
        ctx.stack, ctx.token_layout = stack, stack.token_layout if stack.shares_out() else None
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Recomputed layers read the distribution of their own forward.
        ctx.stack.token_layout = ctx.token_layout
        return gradient, None


class ContextStack(Shared):
    """Stack of layers whose tokens are split over ranks.

    Args:
        groups: process groups of the attention scheme.
        group: all cp ranks.
        arguments: names of a layer's per-token arguments -> their token dim.
        unshardable_arguments: names of a layer's arguments that its blocks need in full.
        random: RNG state of the rank's tokens.
        has_layer_drop: whether the loop skips layers at random; every layer then splits and gathers the sequence.

    Attributes:
        token_layout: the sequence of the current forward, of the last one, or of the layers that backward recomputes.
        is_inside: whether a forward is between the first layer and the last one, or the end of its pipeline stage.
        full_sequence_blocks: names of the active blocks that compute on full sequences.
        keeps_some_logits: whether the current call requests the logits of some tokens only.
        modality_encoders: encoders that compute on full sequences.
        keeps_tokens (`Callable`): whether the modules after the layers compute on local tokens too.
    """

    def __init__(
        self,
        groups: ContextGroups,
        group: dist.ProcessGroup,
        arguments: Mapping[str, int],
        unshardable_arguments: Collection[str],
        random: StreamOfPart,
        has_layer_drop: bool = False,
    ):
        self.groups, self.group, self.arguments, self.random = groups, group, arguments, random
        self.unshardable_arguments, self.has_layer_drop = unshardable_arguments, has_layer_drop
        self.ranks = dist.get_world_size(group)
        self.token_layout: TokenLayout | None = None
        self.full_sequence_blocks: list[str] = []
        self.keeps_tokens: Callable[[], bool] = bool
        self.keeps_some_logits = False
        self._is_cut = self._has_entered = self.is_inside = False
        self._active: list[int] = []
        self._rows = 0
        self._call: frozenset[str] = frozenset()
        self._before: Any = None
        self.modality_encoders = ModalityEncoders()

    def install(self, model: nn.Module, layers: nn.ModuleList, hooks: ForwardHooks) -> None:
        """Registers hooks on a model and its base, and functions around its layers."""
        for index, layer in enumerate(layers):
            names = tuple(inspect.signature(layer.forward).parameters)
            enter = self._enter_first if index == 0 or self.has_layer_drop else self._enter
            is_last = self.has_layer_drop or index == len(layers) - 1
            # Outside of all hooks, and of what `layer.compile()` compiles: the order of a rank's tokens is known on the
            # host only.
            surround(layer, functools.partial(enter, names), self._leave if is_last else None)
        self.modality_encoders.install(model, layers)
        base: Any = model.base_model
        for module in (model,) if base is model else (model, base):
            parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
            begin = functools.partial(self._begin, parameters)
            hooks.add_to(module, "sequence split", begin, self._end, always_exit=True)
        hooks.add_to(base, "sequence split", self._begin_row, self._end_row, always_exit=True)
        StackEnds(
            self,
            next(name for name, module in model.named_modules() if module is layers),
            splits=self._enter_first,
            gathers=self._leave,
            setting="cp_size > 1",
            off="cp_size=1",
            is_on_every_layer=True,
        ).install(base, model, hooks)

    def get_token_layout(self, length: int, documents: tuple[int, ...] = ()) -> TokenLayout | None:
        """Returns the distribution of the current sequence, computed once for all masks of a forward.

        `None` if a rank would have no token: models cannot compute on zero tokens, so every rank computes all of them.
        """
        if self.token_layout is None or self.token_layout.length != length:
            layout = TokenLayout(self.groups, length, documents)
            layout.handed_on = self._call
            self.token_layout = layout if min(layout.order.sizes) else None
        return self.token_layout

    def shares_out(self) -> bool:
        """Returns whether the code that runs now computes on local tokens of a sequence."""
        is_inside = bool(self._active) and self._is_cut and self._has_entered
        return self.token_layout is not None and (is_inside or in_backward())

    @property
    def has_parts(self) -> bool:
        """Whether attention that runs now sees local tokens only, that is outside of full-sequence blocks."""
        return self.shares_out() and not self.full_sequence_blocks

    def leave_stage(self, hidden: Tensor) -> Tensor:
        """Ends the local part of a stack on a pipeline stage; `[batch, local, hidden]` stays split."""
        self.is_inside = False
        return _RestoreRow.apply(hidden, self)

    def part_of(self, hidden: Tensor) -> tuple[Tensor, HeldTokens | None]:
        """Returns the tokens of `[batch, sequence, hidden]` whose loss this rank takes, with their description."""
        if self.token_layout is None or not self.shares_out():
            return hidden, None
        # The layers left local tokens: [batch, local, hidden] in zigzag order.
        if self.keeps_tokens():
            return hidden, HeldTokens(self.token_layout.order, self.group)
        if hidden.dim() != 3 or hidden.shape[_TOKENS] != self.token_layout.length:
            return hidden, None
        # Full sequences: each rank computes the loss of one contiguous chunk, [batch, length / cp, hidden].
        order = SequenceOrder.contiguous(self.token_layout.length, self.ranks)
        return take_tokens(hidden, _TOKENS, order, self.groups.rank), HeldTokens(order, self.group)

    def on_full_sequence(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps a function that the loop calls between layers, so that it gets full states `[batch, sequence, hidden]`.

        What it adds is identical on all ranks; each keeps its local tokens.
        """

        @functools.wraps(function)
        def of_full(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            layout = self.token_layout
            if layout is None or not self.shares_out() or self.has_layer_drop:
                return function(hidden_states, *args, **kwargs)
            # [batch, local, hidden] -> [batch, length, hidden] for the function -> [batch, local, hidden]
            full_output = function(gather_tokens(hidden_states, _TOKENS, layout.order, self.group), *args, **kwargs)
            return take_tokens(full_output, _TOKENS, layout.order, self.groups.rank)

        return of_full

    # Hooks around a model call

    @leave_uncompiled
    def _begin(self, names: tuple[str, ...], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._active.append(id(module))
        # Only the outermost of nested calls (model, base model) begins and ends the split.
        if len(self._active) > 1:
            return None
        arguments = dict(zip(names, args, strict=False)) | kwargs
        # Cached calls compute in full on every rank: a cache holds all tokens.
        self._is_cut = not _keeps_cache(module, names, arguments)
        self._call = frozenset(kwargs)
        kept = arguments.get("logits_to_keep")
        self.keeps_some_logits = kept is not None and not (isinstance(kept, int) and kept == 0)
        self._before, RUNTIME.context = RUNTIME.context, self if self._is_cut else None

        def entering(tensor: Tensor) -> Tensor:
            # Inputs with a gradient, such as inputs_embeds [batch, length, hidden], get the ranks' average.
            return _OfAllRanks.apply(tensor, self.group) if tensor.requires_grad else tensor

        return mapped(args, entering), mapped(kwargs, entering)

    @leave_uncompiled
    def _end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if id(module) not in self._active:
            # A hook before this one has raised.
            return None
        self._active.remove(id(module))
        if self._active:
            return None
        RUNTIME.context = self._before
        if self._is_cut and isinstance(output, ModelOutput) and isinstance(parts := output.get(ROUTER_LOGITS), tuple):
            output[ROUTER_LOGITS] = tuple(map(self.gather_token_outputs, parts))
        return output

    def _begin_row(self, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.token_layout, self._has_entered, self.is_inside = None, False, False
        self.full_sequence_blocks.clear()

    def _end_row(self, base: nn.Module, args: tuple, output: Any) -> None:
        self.random.leave()

    def gather_token_outputs(self, part: Any) -> Any:
        """Gathers per-token outputs of routers, `[batch * local, ...]`; other values are returned as is."""
        layout = self.token_layout
        if not self._is_cut or layout is None or not isinstance(part, Tensor) or part.dim() != 2:
            return part
        # Outputs of full-sequence blocks have all tokens already.
        held = layout.order.sizes[self.groups.rank]
        rows = self._rows
        if part.shape[0] != rows * held or held == layout.length:
            return part
        # [batch * local, experts] -> [batch, length, experts] -> [batch * length, experts]
        return gather_tokens(part.view(rows, held, -1), _TOKENS, layout.order, self.group).flatten(0, 1)

    # Hooks around a layer

    def _enter_first(self, names: tuple[str, ...], layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._enter(names, layer, args, kwargs, is_first=True)

    def _enter(
        self,
        names: tuple[str, ...],
        layer: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        is_first: bool = False,
    ) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        masks = [value for value in arguments.values() if isinstance(value, ContextMask)]
        # Until transformers 5.22 the hooks of a layer run again when backward recomputes it, with or without a mask.
        is_again = self.token_layout is not None and in_backward()
        if not masks and not (self._active and self._is_cut) and not is_again:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        # A recomputed layer uses the sequence that `_RestoreRow` restored.
        layout = self.token_layout
        if masks:
            layout = masks[0].token_layout
        elif is_first:
            layout = self.get_token_layout(hidden.shape[_TOKENS])
        if layout is None:
            return None
        self.token_layout, self._has_entered, self.is_inside = layout, True, True
        if is_first:
            if hidden.dim() < 3 or hidden.shape[_TOKENS] != layout.length:
                raise UnsupportedError(
                    f"{type(layer).__name__} was called with hidden states {tuple(hidden.shape)} for a sequence of "
                    f"{layout.length} tokens: with cp_size > 1 they have to be [batch, sequence, ...]."
                )
            self._rows = hidden.shape[0]
            if layer.training:
                # Dropout inside the layers differs between ranks, as their tokens do.
                self.random.enter()

        def shard_argument(name: str, value: Any) -> Any:
            # First layer: [batch, length, hidden] -> [batch, local, hidden]. Later layers get local tokens already.
            if name == names[0]:
                return take_tokens(value, _TOKENS, layout.order, self.groups.rank) if is_first else value
            if name in self.arguments:
                # For example position_ids [batch, length] and rotary embeddings [batch, length, head_dim].
                return mapped(value, functools.partial(layout.own, dim=self.arguments[name]))
            is_number = isinstance(value, Tensor) and value.is_floating_point()
            if is_number and layout.length in value.shape[1:3] and name not in self.unshardable_arguments:
                raise UnsupportedError(
                    f"{type(layer).__name__} takes `{name}` {tuple(value.shape)} with an entry for each token, which "
                    "would not be sharded. Add it to the family's `per_token_arguments` or `sequence_dims`, or use "
                    "cp_size=1."
                )
            return value

        args = tuple(shard_argument(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: shard_argument(name, value) for name, value in kwargs.items()}

    def _leave(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden, self.is_inside = _RestoreRow.apply(hidden, self), False
        # [batch, local, hidden] -> [batch, length, hidden], unless the head computes its loss from local tokens.
        if self.shares_out() and not self.keeps_tokens():
            self.random.leave()
            assert self.token_layout is not None
            hidden = gather_tokens(hidden, _TOKENS, self.token_layout.order, self.group)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])


def _keeps_cache(module: Any, names: tuple[str, ...], arguments: dict[str, Any]) -> bool:
    """Returns whether a call reads or writes cached keys and values."""
    if any(arguments.get(name) is not None for name in CACHE_ARGUMENTS):
        return True
    use_cache = arguments.get("use_cache")
    if use_cache is None and "use_cache" in names:
        use_cache = getattr(module.config.get_text_config(), "use_cache", False)
    return bool(use_cache)

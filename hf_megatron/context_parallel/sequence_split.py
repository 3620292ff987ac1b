"""Where a row is cut: before the first layer, and joined again behind the last one, or not before the loss.

    ids -> embeddings, positions, masks   whole on every rank
    first layer                           each rank takes its tokens
    layers                                on these; attention sees all of them
    norm, head, loss of labels            on these too, or
    last layer                            tokens are joined: what follows is whole again

Gradients are averaged over the ranks of a row as over data parallel ones. What all ranks compute alike has one
process's gradient on each; where a rank computes its tokens only, joining and summing hand it all ranks' gradients of
these, so that its own are as many times too large as there are ranks.

A call that keeps or reads a cache, and a row of too few tokens, is computed whole on every rank.
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
from ..core.communication.rng import StreamOfPart
from ..core.forward_hooks import ForwardHooks
from ..core.runtime import RUNTIME
from ..errors import UnsupportedError
from ..tensor_parallel.install_regions import ROUTER_LOGITS
from .attention import ContextGroups, SharedSample
from .load_balancing import SequenceOrder
from .local_tokens import HeldTokens, mapped
from .mask_specs import ContextMask
from .modality_encoders import ModalityEncoders
from .token_exchange import gather_tokens, take_tokens

_TOKENS = 1
_CACHES = ("past_key_values", "cache_params")


class _OfAllRanks(torch.autograd.Function):
    """Identity of what every rank was given, whose gradient is the average of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        unsharded = gradient.clone()
        dist.all_reduce(unsharded, group=ctx.group)
        return unsharded / dist.get_world_size(ctx.group), None


class _RestoreRow(torch.autograd.Function):
    """Identity at the end of a stack whose backward tells the stack which row it is computing again.

    It runs before any layer of its graph is recomputed, also when another forward came in between.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stack: "ContextStack") -> Tensor:
        ctx.stack, ctx.row = stack, stack.row if stack.shares_out() else None
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stack.row = ctx.row
        return gradient, None


class ContextStack(Shared):
    """A stack of layers whose tokens lie on several ranks.

    Args:
        groups: the ranks.
        group: all of them in one.
        arguments: of a layer, by name, that have an entry for each token -> the dim of these.
        unshardable_arguments: of a layer, by name, that are whole in its blocks.
        random: what a rank's tokens draw from.

    Attributes:
        row: the row of the forward under way, or of the last one, or of what backward computes again.
        full_sequence_blocks: names of the blocks under way that have whole rows.
        keeps_some_logits: whether the call under way asks for the logits of some tokens only.
        towers: what has rows of its own, whole on every rank.
        keeps_tokens (`Callable`): whether what follows the layers works on this rank's tokens too.
    """

    def __init__(
        self,
        groups: ContextGroups,
        group: dist.ProcessGroup,
        arguments: Mapping[str, int],
        unshardable_arguments: Collection[str],
        random: StreamOfPart,
    ):
        self.groups, self.group, self.arguments, self.random = groups, group, arguments, random
        self.unshardable_arguments = unshardable_arguments
        self.ranks = dist.get_world_size(group)
        self.row: SharedSample | None = None
        self.full_sequence_blocks: list[str] = []
        self.keeps_tokens: Callable[[], bool] = bool
        self.keeps_some_logits = False
        self._is_cut = self._has_entered = False
        self._active: list[int] = []
        self._rows = 0
        self._call: frozenset[str] = frozenset()
        self._before: Any = None
        self.modality_encoders = ModalityEncoders()

    def install(self, model: nn.Module, layers: nn.ModuleList, hooks: ForwardHooks) -> None:
        """Puts hooks around a model, its base and its layers; theirs are the outermost of layers."""
        for index, layer in enumerate(layers):
            names = tuple(inspect.signature(layer.forward).parameters)
            enter = functools.partial(self._enter, names, index == 0)
            layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        layers[-1].register_forward_hook(self._leave)
        self.modality_encoders.install(model, layers)
        base: Any = model.base_model
        for module in (model,) if base is model else (model, base):
            parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
            begin = functools.partial(self._begin, parameters)
            hooks.add_to(module, "sequence split", begin, self._end, always_exit=True)
        hooks.add_to(base, "sequence split", self._begin_row, self._end_row, always_exit=True)

    def row_of(self, length: int, documents: tuple[int, ...] = ()) -> SharedSample | None:
        """Returns where the tokens of the row under way lie, once for all masks of a forward.

        A row that leaves a rank without a token has none: models cannot compute on no token, so every rank has it all.
        """
        if self.row is None or self.row.length != length:
            row = SharedSample(self.groups, length, documents)
            row.handed_on = self._call
            self.row = row if min(row.order.sizes) else None
        return self.row

    def shares_out(self) -> bool:
        """Tells whether what computes now has some tokens of a row."""
        is_inside = bool(self._active) and self._is_cut and self._has_entered
        return self.row is not None and (is_inside or in_backward())

    @property
    def has_parts(self) -> bool:
        """Whether attention that computes now has some tokens of a row, and those alone."""
        return self.shares_out() and not self.full_sequence_blocks

    def leave_stage(self, hidden: Tensor) -> Tensor:
        """Ends the part of a stack that a pipeline stage holds; `[batch, held, hidden]` stays."""
        return _RestoreRow.apply(hidden, self)

    def part_of(self, hidden: Tensor) -> tuple[Tensor, HeldTokens | None]:
        """Returns what a head takes its loss of, of `[batch, sequence, hidden]`, and which tokens these are."""
        if self.row is None or not self.shares_out():
            return hidden, None
        if self.keeps_tokens():
            return hidden, HeldTokens(self.row.order, self.group)
        if hidden.dim() != 3 or hidden.shape[_TOKENS] != self.row.length:
            return hidden, None
        order = SequenceOrder.contiguous(self.row.length, self.ranks)
        return take_tokens(hidden, _TOKENS, order, self.groups.rank), HeldTokens(order, self.group)

    def on_full_sequence(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns a function of a loop that is handed whole hidden states between layers, `[batch, sequence, hidden]`.

        Of what it adds, which every rank has, a rank keeps its tokens' share.
        """

        @functools.wraps(function)
        def of_full(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            row = self.row
            if row is None or not self.shares_out():
                return function(hidden_states, *args, **kwargs)
            unsharded = function(gather_tokens(hidden_states, _TOKENS, row.order, self.group), *args, **kwargs)
            return take_tokens(unsharded, _TOKENS, row.order, self.groups.rank)

        return of_full

    # Around a call

    @leave_uncompiled
    def _begin(self, names: tuple[str, ...], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._active.append(id(module))
        if len(self._active) > 1:
            return None
        given = dict(zip(names, args, strict=False)) | kwargs
        self._is_cut = not _keeps_cache(module, names, given)
        self._call = frozenset(kwargs)
        kept = given.get("logits_to_keep")
        self.keeps_some_logits = kept is not None and not (isinstance(kept, int) and kept == 0)
        self._before, RUNTIME.context = RUNTIME.context, self if self._is_cut else None

        def entering(tensor: Tensor) -> Tensor:
            return _OfAllRanks.apply(tensor, self.group) if tensor.requires_grad else tensor

        return mapped(args, entering), mapped(kwargs, entering)

    @leave_uncompiled
    def _end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if id(module) not in self._active:
            # What stands before the call has raised.
            return None
        self._active.remove(id(module))
        if self._active:
            return None
        RUNTIME.context = self._before
        if self._is_cut and isinstance(output, ModelOutput) and isinstance(parts := output.get(ROUTER_LOGITS), tuple):
            output[ROUTER_LOGITS] = tuple(map(self.gather_token_outputs, parts))
        return output

    def _begin_row(self, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.row, self._has_entered = None, False
        self.full_sequence_blocks.clear()

    def _end_row(self, base: nn.Module, args: tuple, output: Any) -> None:
        self.random.leave()

    def gather_token_outputs(self, part: Any) -> Any:
        """Joins what has an entry for each token of this rank's rows, `[batch * held, ...]`; other things stay."""
        row = self.row
        if not self._is_cut or row is None or not isinstance(part, Tensor) or part.dim() != 2:
            return part
        held = row.order.sizes[self.groups.rank]
        rows = self._rows
        if part.shape[0] != rows * held or held == row.length:
            return part
        return gather_tokens(part.view(rows, held, -1), _TOKENS, row.order, self.group).flatten(0, 1)

    # Around a layer

    def _enter(
        self, names: tuple[str, ...], is_first: bool, layer: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        masks = [value for value in given.values() if isinstance(value, ContextMask)]
        # Until transformers 5.22 a layer that backward computes again runs its hooks again, with a mask or without.
        is_again = self.row is not None and in_backward()
        if not masks and not (self._active and self._is_cut) and not is_again:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        # A layer that is computed again, in backward, brings the row that it had.
        row = masks[0].row if masks else self.row_of(hidden.shape[_TOKENS]) if is_first else self.row
        if row is None:
            return None
        self.row, self._has_entered = row, True
        if is_first:
            if hidden.dim() < 3 or hidden.shape[_TOKENS] != row.length:
                raise UnsupportedError(
                    f"{type(layer).__name__} was called with hidden states {tuple(hidden.shape)} of a row of "
                    f"{row.length} tokens: with cp_size > 1 they have to be [batch, sequence, ...]."
                )
            self._rows = hidden.shape[0]
            if layer.training:
                self.random.enter()

        def own(name: str, value: Any) -> Any:
            if name == names[0]:
                return take_tokens(value, _TOKENS, row.order, self.groups.rank) if is_first else value
            if name in self.arguments:
                return mapped(value, functools.partial(row.own, dim=self.arguments[name]))
            is_number = isinstance(value, Tensor) and value.is_floating_point()
            if is_number and row.length in value.shape[1:3] and name not in self.unshardable_arguments:
                raise UnsupportedError(
                    f"{type(layer).__name__} takes `{name}` {tuple(value.shape)} with an entry for each token, which "
                    "the ranks of a row cannot share out: state it in the family's `per_token_arguments` or "
                    "`sequence_dims`, or use cp_size=1."
                )
            return value

        args = tuple(own(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: own(name, value) for name, value in kwargs.items()}

    def _leave(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        hidden = output if isinstance(output, Tensor) else output[0]
        hidden = _RestoreRow.apply(hidden, self)
        if self.shares_out() and not self.keeps_tokens():
            self.random.leave()
            assert self.row is not None
            hidden = gather_tokens(hidden, _TOKENS, self.row.order, self.group)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])


def _keeps_cache(module: Any, names: tuple[str, ...], given: dict[str, Any]) -> bool:
    """Tells whether a call reads or makes keys and values of earlier tokens."""
    if any(given.get(name) is not None for name in _CACHES):
        return True
    wanted = given.get("use_cache")
    if wanted is None and "use_cache" in names:
        wanted = getattr(module.config.get_text_config(), "use_cache", False)
    return bool(wanted)

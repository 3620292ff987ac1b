"""Padding tokens of the current forward, which statistics of routers leave out, as losses do."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.communication.collectives import bounds
from ..core.forward_hooks import ForwardHooks
from ..core.runtime import RUNTIME
from ..parallel_state import ParallelState

_MASK = "attention_mask"
_DECODER_MASK = "decoder_attention_mask"


class RouterPadding(Shared):
    """Padding masks of the current forward, narrowed down to the tokens that each router sees on this rank.

    Args:
        state (`ParallelState`): of the model.
        sequence_sharded_moe (`frozenset[str]`): MoE blocks in which tp ranks see different tokens.
    """

    def __init__(self, state: ParallelState, sequence_sharded_moe: frozenset[str]):
        self.state, self.sequence_sharded_moe = state, sequence_sharded_moe
        self._masks: dict[str, Tensor] = {}
        # (argument, whether tp splits the tokens, whether cp splits them) -> flattened mask of the local tokens.
        self._kept: dict[tuple[str, bool, bool], Tensor] = {}

    def install(self, model: Any, hooks: ForwardHooks) -> None:
        """Registers hooks on the base model, which each microbatch of a pipeline passes through."""
        base: Any = model.base_model
        self._names = tuple(inspect.signature(type(base).forward).parameters)[1:]
        hooks.add_to(base, "router padding", self._enter, self._leave, always_exit=True)

    def _enter(self, base: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        values = {name: arguments.get(name) for name in (_MASK, _DECODER_MASK)}
        # Masks of more dims describe pairs of tokens, not padding.
        self._masks = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.dim() == 2}
        self._kept.clear()

    def _leave(self, base: nn.Module, args: tuple, output: Any) -> None:
        self._masks = {}
        self._kept.clear()

    def drop(self, name: str, chosen: Tensor) -> Tensor:
        """Returns a router's choices `[tokens, choices]` with -1 for those of padding tokens and repeated microbatches.

        Args:
            name (`str`): of the module with the experts.
            chosen (`Tensor`): expert ids of the tokens that this rank sees.
        """
        span = self.state.call.span
        if span is not None and span.is_repeated:
            return torch.full_like(chosen, -1)
        kept = self._local_mask(name)
        # Experts that all get every token are called with the tokens once per expert.
        if kept is None or not kept.numel() or chosen.shape[0] % kept.numel():
            return chosen
        return chosen.masked_fill(~kept.repeat(chosen.shape[0] // kept.numel()).unsqueeze(1), -1)

    def _local_mask(self, name: str) -> Tensor | None:
        """Returns which of the tokens `[batch * local]` of a router are not padding; `None` without a mask."""
        # A decoder on an encoder has a mask of its own; a decoder-only model may call its layers a decoder, too.
        is_decoder = _DECODER_MASK in self._names and "decoder" in name.split(".")
        argument = _DECODER_MASK if is_decoder else _MASK
        mask = self._masks.get(argument)
        if mask is None:
            return None
        context = RUNTIME.context
        is_split, has_parts = name.rpartition(".")[0] in self.sequence_sharded_moe, bool(context and context.has_parts)
        key = argument, is_split, has_parts
        if key not in self._kept:
            # [batch, length] -> [batch, length / cp] -> [batch, length / cp / tp], as hidden states are split.
            local = context.token_layout.own(mask) if has_parts else mask
            if is_split:
                start, stop = bounds(local.shape[1], self.state.axes.size("tp"), self.state.axes.rank("tp"))
                local = local[:, start:stop]
            self._kept[key] = local.flatten() != 0
        return self._kept[key]

"""Wrappers of transformers' attention and mask functions that handle tokens split over ranks.

The user's choice of implementation keeps its name, by which models branch; other models in the process are not
affected.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.memory.recompute import recomputing
from ..core.runtime import RUNTIME
from ..data_parallel.packed_sequences import without_asking
from ..errors import ConfigError, UnsupportedError
from .compiled_attention import run_compiled_attention
from .mask_specs import ContextMask, describe_mask
from .split_attention import attend_to_split_sequence

# Arguments of attention functions that are read here or repeat what the mask contains.
_KNOWN = frozenset(
    (
        *("scaling", "dropout", "softcap", "s_aux", "sliding_window", "is_causal", "position_ids", "seq_idx"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        "logits_to_keep",
    )
)


def attention_function(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Callable:
    """Returns an attention function for full sequences and for sequences that are split over ranks."""
    return recomputing(partial(_attend, original(self, *args, **kwargs)))


def mask_function(original: Callable, self: Any, name: str) -> Any:
    """Returns the stock mask function, or one that describes the mask if the current sequence is split over ranks."""
    stock_function = original(self, name)
    if type(self).__name__ != "AttentionMaskInterface":
        return stock_function
    # No sequence is split now: only avoid the stock function's reads of device values.
    if RUNTIME.context is None:
        return without_asking(stock_function)
    return partial(_describe, RUNTIME.context, stock_function, name == "eager")


def _describe(
    stack: Any,
    stock: Callable,
    is_eager: bool,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    if attention_mask is not None and not (kv_offset or q_offset) and attention_mask.shape[-1] != q_length:
        raise ConfigError(f"attention_mask {tuple(attention_mask.shape)}: expected [batch, {q_length}].")
    if q_length != kv_length or kv_offset or q_offset:
        raise UnsupportedError(
            f"{q_length} queries with {kv_length} keys: with cp_size > 1 a model needs full sequences without a KV "
            "cache. Call it with use_cache=False and all tokens, or load it with cp_size=1."
        )
    stocks = partial(
        stock,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    if attention_mask is not None and attention_mask.shape[0] != batch_size:
        # The stock function raises its own error.
        return stocks()
    # Intervals on the host instead of a mask [batch, 1, queries, keys].
    mask = describe_mask(mask_function, batch_size, q_length, attention_mask)
    layout = stack.get_token_layout(q_length, mask.borders)
    return stocks() if layout is None else ContextMask(layout, mask, stocks, spreads=is_eager)


def _attend(
    stock_attention: Callable,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    # Not one of our masks: reject it if queries are local tokens only.
    if not isinstance(attention_mask, ContextMask):
        stack = RUNTIME.context
        if stack is not None and stack.has_parts and module not in stack.modality_encoders:
            argument = "no mask" if attention_mask is None else f"a mask {tuple(attention_mask.shape)}"
            raise UnsupportedError(
                f"{type(module).__name__} with cp_size > 1: its attention received {argument} that was not created by "
                "transformers' mask functions, so it cannot be sharded. Pass attention_mask [batch, sequence], or use "
                "cp_size=1."
            )
        return stock_attention(module, query, key, value, attention_mask, *args, **kwargs)
    # Unknown arguments could change attention in ways that the kernel does not implement.
    known = _KNOWN | attention_mask.token_layout.handed_on
    unknown = sorted(name for name, argument in kwargs.items() if name not in known and argument is not None)
    if unknown or args:
        raise UnsupportedError(
            f"{type(module).__name__} with cp_size > 1: context-parallel attention does not support "
            f"{', '.join(unknown) or 'further arguments'}. Load the model with cp_size=1."
        )
    if kwargs.get("dropout"):
        raise UnsupportedError(
            f"{type(module).__name__}: attention dropout of {kwargs['dropout']} is not supported with cp_size > 1. Set "
            "it to 0 in the config, or load the model with cp_size=1."
        )
    # Custom autograd functions are not covered by autocast.
    query, key, value = _autocast(query, key, value)
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    is_causal = bool(getattr(module, "is_causal", True))
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    if torch.compiler.is_compiling():
        number = attention_mask.number
        assert number is not None
        return run_compiled_attention(query, key, value, sinks, number, scale, softcap, is_causal), None
    return attend_to_split_sequence(query, key, value, sinks, attention_mask, scale, softcap, is_causal), None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts queries, keys and values of any shape as autocast does before torch's attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors)

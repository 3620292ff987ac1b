"""Finds the blocks that context parallelism runs on full sequences."""

import inspect

from torch import nn

from ..compat.transformers_models import fetches_attention_core
from .name_patterns import generic
from .spec import ModelSpec

# By these a block keeps what it has seen of earlier tokens.
_CACHES = frozenset(("past_key_values", "past_key_value", "cache_params", "layer_past", "use_cache"))


def find_full_sequence_blocks(model: nn.Module, spec: ModelSpec, layers: str) -> frozenset[str]:
    """Names the blocks inside of layers that keep a cache and are no attention of transformers', and the spec's."""
    found: set[str] = set()
    seen: list[str] = []
    for name, module in model.named_modules():
        is_block = name.startswith(f"{layers}.") and name.count(".") > layers.count(".") + 1
        if not is_block or any(name.startswith(f"{outer}.") for outer in seen):
            continue
        if _keeps_cache(module):
            seen.append(name)
        if generic(name) in spec.cp.full_sequence_blocks or (_keeps_cache(module) and not _is_attention(module)):
            found.add(name)
    return frozenset(found)


def _keeps_cache(module: nn.Module) -> bool:
    return not _CACHES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _is_attention(block: nn.Module) -> bool:
    """Tells whether all that a block keeps is what transformers' attention functions are called with."""
    attention = [part for part in block.modules() if fetches_attention_core(type(part))]
    known = {inner for part in attention for inner in block.modules() if part is inner or part in inner.modules()}
    return bool(attention) and all(part in known for part in block.modules() if _keeps_cache(part))

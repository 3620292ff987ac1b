"""OLMo 2: norms after attention and MLP instead of before, and query and key norms over all heads.

The names are Megatron-Bridge's (`src/megatron/bridge/models/olmo2/olmo2_bridge.py` at 57852623).
"""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import NORMS_BEHIND, Family, attention, gated_mlp, renamed, rotary_decoder_arguments


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    bias = bool(config.attention_bias)
    yield from attention(config, source, target, norm=False, qkv_bias=bias, output_bias=bias, qk_norms=True)
    post_norm = f"{target}.self_attention.linear_proj.post_layernorm"
    yield from renamed(f"{source}.post_attention_layernorm", post_norm)
    yield from gated_mlp(config.intermediate_size, f"{source}.mlp", f"{target}.mlp")
    yield from renamed(f"{source}.post_feedforward_layernorm", f"{target}.mlp.linear_fc2.post_layernorm")


FAMILY = Family(
    model_types=("olmo2",),
    layer=_layer,
    arguments=lambda config: rotary_decoder_arguments(config, qk_layernorm=True),
    unchecked=lambda config: NORMS_BEHIND,
)

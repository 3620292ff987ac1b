"""Gemma, Gemma 2 and the text models of Gemma 3: zero-centered norms (`layernorm_zero_centered_gamma`), as stored.

Gemma 2 and 3 have norms after attention and MLP, which Megatron-Core 0.16.1 does not support. Their names are the ones
of Megatron-Bridge (`src/megatron/bridge/models/gemma/gemma2_bridge.py` at 0a12eb78, `gemma3_bridge.py` at 0a12eb78).
"""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import Rule
from .family import NORMS_BEHIND, Arguments, Family, attention, dense_mlp, renamed, rotary_decoder_arguments


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    bias, qk_norms = bool(config.attention_bias), config.model_type == "gemma3_text"
    yield from attention(config, source, target, qkv_bias=bias, output_bias=bias, qk_norms=qk_norms)
    if config.model_type == "gemma":
        yield from dense_mlp(config, source, target)
        return
    post_norm = f"{target}.self_attention.linear_proj.post_layernorm"
    yield from renamed(f"{source}.post_attention_layernorm", post_norm)
    yield from renamed(f"{source}.post_feedforward_layernorm", f"{target}.mlp.linear_fc2.post_layernorm")
    yield from dense_mlp(config, source, target, norm="pre_feedforward_layernorm")


def _arguments(config: Any) -> Arguments:
    further: Arguments = {}
    if config.model_type != "gemma":
        further = {
            "softmax_scale": config.query_pre_attn_scalar**-0.5,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "qk_layernorm": config.model_type == "gemma3_text",
        }
    return rotary_decoder_arguments(config, swiglu=False, apply_layernorm_1p=True, **further)


FAMILY = Family(
    model_types=("gemma", "gemma2", "gemma3_text"),
    layer=_layer,
    arguments=_arguments,
    unchecked=lambda config: None if config.model_type == "gemma" else NORMS_BEHIND,
)

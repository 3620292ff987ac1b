"""T5 1.1, mT5 and Flan-T5 as megatron-core's T5Model with relative positions (`models/T5`)."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import GroupedKV, Rule
from .family import Arguments, Family, fused_norm, gated_mlp, qkv, renamed


def _layer(config: Any, number: int, source: str, target: str, mlp: int = 1) -> Iterator[Rule]:
    self_attention, attention = f"{source}.layer.0.SelfAttention", f"{target}.self_attention"
    yield from fused_norm(f"{source}.layer.0.layer_norm", f"{attention}.linear_qkv")
    yield Rule(
        tuple(f"{self_attention}.{part}.weight" for part in "qkv"), (f"{attention}.linear_qkv.weight",), qkv(config)
    )
    yield from renamed(f"{self_attention}.o", f"{attention}.linear_proj")
    yield from fused_norm(f"{source}.layer.{mlp}.layer_norm", f"{target}.mlp.linear_fc1")
    inner = f"{source}.layer.{mlp}.DenseReluDense"
    yield from gated_mlp(config.d_ff, inner, f"{target}.mlp", names=("wi_0", "wi_1", "wo"))


def _decoder_layer(config: Any, source: str, target: str) -> Iterator[Rule]:
    yield from _layer(config, 0, source, target, mlp=2)
    cross, attention = f"{source}.layer.1.EncDecAttention", f"{target}.cross_attention"
    yield from renamed(f"{source}.layer.1.layer_norm", f"{target}.pre_cross_attn_layernorm")
    yield from renamed(f"{cross}.q", f"{attention}.linear_q")
    parts = tuple(f"{cross}.{part}.weight" for part in "kv")
    yield Rule(parts, (f"{attention}.linear_kv.weight",), GroupedKV(config.num_heads, config.d_kv))
    yield from renamed(f"{cross}.o", f"{attention}.linear_proj")


def _decoder(config: Any, padded: int) -> Iterator[Rule]:
    for number in range(config.num_decoder_layers):
        yield from _decoder_layer(config, f"decoder.block.{number}", f"decoder.layers.{number}")
    yield from renamed("decoder.final_layer_norm", "decoder.final_layernorm")
    for block in ("encoder", "decoder"):
        bias = f"{block}.block.0.layer.0.SelfAttention.relative_attention_bias"
        yield from renamed(bias, f"{block}_relative_pos_emb.relative_attention_bias")


def _arguments(config: Any) -> Arguments:
    return {
        "num_layers": config.num_layers,
        "encoder_num_layers": config.num_layers,
        "decoder_num_layers": config.num_decoder_layers,
        "hidden_size": config.d_model,
        "ffn_hidden_size": config.d_ff,
        "num_attention_heads": config.num_heads,
        "kv_channels": config.d_kv,
        "vocab_size": config.vocab_size,
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config.layer_norm_epsilon,
        "add_bias_linear": False,
        # T5 does not scale attention scores.
        "softmax_scale": 1.0,
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": config.relative_attention_num_buckets,
        "relative_attention_max_distance": config.relative_attention_max_distance,
    }


def _unsupported_reason(config: Any) -> str | None:
    if getattr(config, "scale_decoder_outputs", False):
        return "scale_decoder_outputs (T5 1.0): Megatron-Core's T5Model does not scale the input of the head"
    if not config.is_gated_act:
        return f"feed_forward_proj={config.feed_forward_proj}: expected a gated one, as in T5 1.1"
    return None


FAMILY = Family(
    model_types=("t5", "mt5"),
    layer=_layer,
    arguments=_arguments,
    unsupported_reason=_unsupported_reason,
    embedding="shared",
    layers="encoder.block",
    norm="encoder.final_layer_norm",
    block="encoder",
    heads=_decoder,
    copied_head="lm_head.weight",
    outputs=("output_layer", "lm_head.output_layer"),
    extra_blocks=lambda config: {"decoder": config.num_decoder_layers},
)

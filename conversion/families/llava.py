"""LLaVA 1.5: a Llama, Mistral or Qwen with a CLIP vision encoder and a projector of two linears.

The names are the ones of Megatron-Core's LLaVAModel (`models/multimodal/llava_model.py` of 0.16.1); the shape of the
class token and the order of query, key and value follow Megatron-LM's
`examples/multimodal/model_converter/clip_converter.py` at 00caa53a. Megatron's CLIP omits the norm after the vision
encoder, whose output LLaVA does not read.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..megatron.rules import GroupedQKV, Reshaped, Rule
from .family import fused_norm, renamed
from .llama import FAMILY as LLAMA
from .multimodal import MultimodalFamily, encoder_mlp

_LAST_LAYER = -1


def _encoder_rules(config: Any, names: Collection[str]) -> Iterator[Rule]:
    vision, source, target = config.vision_config, "model.vision_tower", "vision_model"
    width, heads = vision.hidden_size, vision.num_attention_heads
    yield Rule((f"{source}.embeddings.class_embedding",), (f"{target}.class_token",), Reshaped(3))
    yield from renamed(f"{source}.embeddings.patch_embedding", f"{target}.conv1")
    yield from renamed(f"{source}.embeddings.position_embedding", f"{target}.position_embeddings")
    yield from renamed(f"{source}.pre_layrnorm", f"{target}.ln_pre", bias=True)
    for number in range(vision.num_hidden_layers):
        block, layer = f"{source}.encoder.layers.{number}", f"{target}.decoder.layers.{number}"
        attention = f"{layer}.self_attention"
        yield from fused_norm(f"{block}.layer_norm1", f"{attention}.linear_qkv", bias=True)
        for suffix in ("weight", "bias"):
            parts = tuple(f"{block}.self_attn.{part}_proj.{suffix}" for part in "qkv")
            yield Rule(parts, (f"{attention}.linear_qkv.{suffix}",), GroupedQKV(heads, heads, width // heads))
        yield from renamed(f"{block}.self_attn.out_proj", f"{attention}.linear_proj", bias=True)
        yield from encoder_mlp(f"{block}.mlp", f"{layer}.mlp", "fc1", "fc2", f"{block}.layer_norm2")
    for suffix, neutral in (("weight", 1.0), ("bias", 0.0)):
        name = f"{source}.post_layernorm.{suffix}"
        yield Rule((name,), (f"{target}.ln_post.{suffix}",), fill_value=neutral)
    bias = config.multimodal_projector_bias
    for number in (1, 2):
        linear = f"vision_projection.encoder.linear_fc{number}"
        yield from renamed(f"model.multi_modal_projector.linear_{number}", linear, bias=bias)


def _encoder_sizes(config: Any) -> Mapping[str, int]:
    return {
        "vision_config.num_attention_heads": config.vision_config.num_attention_heads,
        "vision_config.intermediate_size": config.vision_config.intermediate_size,
        "text_config.hidden_size": config.text_config.hidden_size,
    }


def _unsupported_reason(config: Any) -> str | None:
    if config.vision_config.model_type != "clip_vision_model":
        return f"vision encoder type {config.vision_config.model_type!r} is not supported; expected clip_vision_model"
    if not isinstance(config.vision_feature_layer, int):
        return "vision_feature_layer: Megatron-Core's LLaVAModel projects the output of a single layer"
    return None


def _unstored(config: Any) -> Iterator[str]:
    if config.vision_feature_layer not in (_LAST_LAYER, config.vision_config.num_hidden_layers):
        yield (
            f"vision_feature_layer={config.vision_feature_layer}: all layers are written, and LLaVAModel projects the "
            "output of the last one"
        )
    yield "vision_model.ln_post, which CLIPViTModel does not have: torch_dist loads without it, rank files do not"


FAMILY = MultimodalFamily(
    model_types=("llava",),
    text=LLAMA,
    encoder_rules=_encoder_rules,
    encoder_sizes=_encoder_sizes,
    own_unsupported_reason=_unsupported_reason,
    own_unstored=_unstored,
)

"""Qwen3-VL: Qwen3 with a vision encoder of Megatron's layers, some with an additional deepstack merger.

The names are Megatron-Bridge's (`src/megatron/bridge/models/qwen_vl/qwen3_vl_bridge.py` at ae12a455,
`modelling_qwen3_vl/vision_model.py` at c86778f5).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..megatron.rules import Rule
from .family import fused_norm, renamed
from .llama import FAMILY as LLAMA
from .multimodal import BRIDGE_ONLY, MultimodalFamily, encoder_mlp, packed_qkv


def _merger(source: str, target: str) -> Iterator[Rule]:
    yield from renamed(f"{source}.norm", f"{target}.patch_norm", bias=True)
    for linear in ("linear_fc1", "linear_fc2"):
        yield from renamed(f"{source}.{linear}", f"{target}.{linear}", bias=True)


def _encoder_rules(config: Any, names: Collection[str]) -> Iterator[Rule]:
    vision, source, target = config.vision_config, "model.visual", "vision_model"
    order = packed_qkv(vision.hidden_size, vision.num_heads)
    yield from renamed(f"{source}.patch_embed.proj", f"{target}.patch_embed.proj", bias=True)
    yield from renamed(f"{source}.pos_embed", f"{target}.pos_embed")
    for number in range(vision.depth):
        block, layer = f"{source}.blocks.{number}", f"{target}.decoder.layers.{number}"
        yield from fused_norm(f"{block}.norm1", f"{layer}.self_attention.linear_qkv", bias=True)
        yield from renamed(f"{block}.attn.qkv", f"{layer}.self_attention.linear_qkv", bias=True, operation=order)
        yield from renamed(f"{block}.attn.proj", f"{layer}.self_attention.linear_proj", bias=True)
        yield from encoder_mlp(f"{block}.mlp", f"{layer}.mlp", "linear_fc1", "linear_fc2", f"{block}.norm2")
    for index in range(len(vision.deepstack_visual_indexes)):
        lists = (f"{module}.deepstack_merger_list.{index}" for module in (source, f"{target}.decoder"))
        yield from _merger(*lists)
    yield from _merger(f"{source}.merger", f"{target}.merger")


def _encoder_sizes(config: Any) -> Mapping[str, int]:
    vision = config.vision_config
    return {
        "vision_config.num_heads": vision.num_heads,
        "vision_config.intermediate_size": vision.intermediate_size,
        "vision_config.hidden_size * spatial_merge_size**2": vision.hidden_size * vision.spatial_merge_size**2,
    }


FAMILY = MultimodalFamily(
    model_types=("qwen3_vl",),
    text=LLAMA,
    encoder_rules=_encoder_rules,
    encoder_sizes=_encoder_sizes,
    text_type="qwen3",
    mrope_section=(24, 20, 20),
    own_unchecked=lambda config: BRIDGE_ONLY,
    own_unstored=lambda config: (
        "interleaved position sections (mrope_interleaved), which Megatron-Bridge's model applies",
    ),
)

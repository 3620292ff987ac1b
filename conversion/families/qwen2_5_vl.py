"""Qwen2.5-VL: Qwen2.5 with transformers' vision encoder, which is replicated on every rank of the first stage.

The names are Megatron-Bridge's (`src/megatron/bridge/models/qwen_vl/qwen25_vl_bridge.py` at 588d3bb8).
"""

from .llama import FAMILY as LLAMA
from .multimodal import BRIDGE_ONLY, MultimodalFamily, carried

FAMILY = MultimodalFamily(
    model_types=("qwen2_5_vl",),
    text=LLAMA,
    encoder_rules=lambda config, names: carried(names, "model.visual", "visual"),
    text_type="qwen2",
    mrope_section=(16, 24, 24),
    own_unchecked=lambda config: BRIDGE_ONLY,
)

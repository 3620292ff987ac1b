"""Qwen3-VL with experts: Qwen3-MoE with the vision encoder of Qwen3-VL.

The names are Megatron-Bridge's (`src/megatron/bridge/models/qwen_vl/qwen3_vl_bridge.py` at ae12a455).
"""

from dataclasses import replace

from .experts import FAMILY as EXPERTS
from .qwen3_vl import FAMILY as QWEN3_VL

FAMILY = replace(QWEN3_VL, model_types=("qwen3_vl_moe",), text=EXPERTS, text_type="qwen3_moe")

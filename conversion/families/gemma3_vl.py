"""Gemma 3 with images: its text model, transformers' vision encoder and a Megatron projector.

The names are Megatron-Bridge's (`src/megatron/bridge/models/gemma_vl/gemma3_vl_bridge.py` at 60477ea1, which builds on
transformers version 4; `modeling_gemma3_vl.py` at 125f30d7).
"""

from collections.abc import Collection, Iterator
from typing import Any

from ..megatron.names import DEEP_TOWER
from ..megatron.rules import Rule, Transposed
from .gemma import FAMILY as GEMMA
from .multimodal import BRIDGE_ONLY, MultimodalFamily, carried

_PROJECTOR = "multi_modal_projector"


def _encoder_rules(config: Any, names: Collection[str]) -> Iterator[Rule]:
    yield from carried(names, "model.vision_tower", DEEP_TOWER.removesuffix("."))
    source = f"model.{_PROJECTOR}"
    yield Rule((f"{source}.mm_soft_emb_norm.weight",), (f"{_PROJECTOR}.mm_soft_embed_norm.weight",))
    yield Rule((f"{source}.mm_input_projection_weight",), (f"{_PROJECTOR}.proj.weight",), Transposed())


FAMILY = MultimodalFamily(
    model_types=("gemma3",),
    text=GEMMA,
    encoder_rules=_encoder_rules,
    encoder_sizes=lambda config: {"text_config.hidden_size": config.text_config.hidden_size},
    own_unchecked=lambda config: BRIDGE_ONLY,
)

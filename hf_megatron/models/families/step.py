"""Step 3.7: attention with a gate for each head, of which transformers' plan computes all on every rank."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec, gated_decoder_plan


@register_model("step3p5")
def step3p5(model: Any) -> ModelSpec:
    plan = gated_decoder_plan(norms=("q_norm", "k_norm")) | {"layers.*.self_attn.g_proj": "colwise"}
    shared = gated_decoder_plan(block="mlp.shared_experts")
    return corrected_spec(
        model, plan | shared, local_attributes={f"{base_prefix(model)}layers.*.self_attn": ("num_heads",)}
    )

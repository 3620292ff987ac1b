"""Step 3.7: gated attention, which transformers' plan replicates."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec, gated_decoder_plan
from ..type_facts import TypeFacts, register_facts


@register_model("step3p5")
def step3p5(model: Any) -> ModelSpec:
    plan = gated_decoder_plan(norms=("q_norm", "k_norm")) | {"layers.*.self_attn.g_proj": "colwise"}
    shared = gated_decoder_plan(block="mlp.shared_experts")
    return corrected_spec(
        model, plan | shared, local_attributes={f"{base_prefix(model)}layers.*.self_attn": ("num_heads",)}
    )


register_facts(
    "step3p5",
    facts=TypeFacts(
        # The default has no window size, which the model needs. The other values are from checkpoints: more heads and
        # fully rotated dims in sliding-window layers, and activation limits in the last layers.
        defaults={
            "sliding_window": 512,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
            "num_sliding_attention_heads": 96,
            "per_layer_config": {layer: {"num_attention_heads": 96} for layer in range(45) if layer % 4},
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
            "swiglu_limits": [0.0] * 43 + [7.0, 7.0],
            "swiglu_limits_shared": [0.0] * 43 + [16.0, 16.0],
        },
    ),
)

"""Gemma: per-layer token inputs in Gemma 3n and 4; sparse MLPs of Gemma 3n that need all gate features."""

from typing import Any

from ..composite import composite_spec
from ..registry import register_model
from ..spec import ModelSpec, module_name
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_PER_LAYER = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


@register_model("gemma4_text")
def gemma4_text(model: Any) -> ModelSpec:
    reason = "its mixture of experts is called by the decoder layer itself, on flattened tokens."
    per_layer = ("per_layer_input",) if model.config.hidden_size_per_layer_input else ()
    return corrected_spec(
        model,
        per_token_arguments=per_layer,
        before_layers=_PER_LAYER,
        pre_layer_arguments=per_layer,
        mutable_layer_arguments=("shared_kv_states",) if model.config.num_kv_shared_layers else (),
        no_sequence_parallel=reason if model.config.enable_moe_block else None,
    )


@register_model("gemma4")
def gemma4(model: Any) -> ModelSpec | None:
    spec = composite_spec(model, {"gemma4_text": gemma4_text})
    if spec is None or not model.config.get_text_config().hidden_size_per_layer_input:
        return spec
    # For the per-layer inputs the model indexes the embedding weight at the padding token, so it must be replicated.
    ends = {module_name(model, end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    return spec.updated(plan={name: style for name, style in spec.tp.plan.items() if name not in ends})


@register_model("gemma3n_text")
def gemma3n_text(model: Any) -> ModelSpec:
    # The cutoff of a sparse activation is computed from mean and deviation over all gate features of a token.
    sparse = [layer for layer, share in enumerate(model.config.activation_sparsity_pattern) if share > 0]
    return corrected_spec(
        model,
        {
            f"layers.{layer}.mlp.{name}": "replicated"
            for layer in sparse
            for name in ("gate_proj", "up_proj", "down_proj")
        },
        before_layers=(
            *_PER_LAYER,
            "altup_projections",
        ),
        after_layers=("altup_unembed_projections",),
        # Pointwise over tokens.
        pointwise_containers=("layers.*.altup", "layers.*.laurel"),
        per_token_arguments=("per_layer_input",),
        residual_streams_first=True,
        pre_layer_arguments=("per_layer_input",),
        mutable_layer_arguments=("shared_kv_states",),
        no_zero_bubble="each of its layers calls its router twice.",
    )


register_facts(
    "diffusion_gemma_text",
    facts=TypeFacts(
        # The default has no expert sizes, but every layer builds experts.
        defaults={"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    ),
)
register_facts(
    "gemma3",
    "shieldgemma2",
    facts=TypeFacts(
        # By default, images have fewer patches than the projector's output tokens, and there is an unused pooling head.
        defaults={
            "vision_config": {
                **{"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
                "vision_use_head": False,
            }
        },
    ),
)
register_facts(
    "gemma4",
    facts=TypeFacts(
        # The default has no vision encoder.
        defaults={"vision_config": {"model_type": "gemma4_vision"}},
        audio={"audio_config": {"model_type": "gemma4_audio"}},
    ),
)
register_facts(
    "gemma4_unified",
    facts=TypeFacts(
        # The default has no vision encoder.
        defaults={"vision_config": {"model_type": "gemma4_unified_vision"}},
        audio={"audio_config": {"model_type": "gemma4_unified_audio"}},
    ),
)
register_facts(
    "gemma",
    "gemma3_text",
    facts=TypeFacts(
        variants=[{"num_key_value_heads": 1}],
    ),
)
register_facts(
    "gemma2",
    facts=TypeFacts(
        variants=[{"attn_logit_softcapping": None, "final_logit_softcapping": None}],
    ),
)
register_facts(
    "gemma4_text",
    facts=TypeFacts(
        variants=[
            {"num_kv_shared_layers": 12},
            {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10},
            {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        ],
    ),
)

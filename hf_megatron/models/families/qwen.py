"""Qwen: Qwen 4 (experimental) has gated residual connections, which are pointwise over tokens."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import SPARSE_INDEXER, UNHEARD_AUDIO, TypeFacts, register_facts
from .delta_net import BLOCK, OF_QWEN3_5

CONNECTIONS = ("layers.*.attn_hyper_connection", "layers.*.mlp_hyper_connection")


@register_model("qwen4_exp_text")
def qwen4_exp_text(model: Any) -> ModelSpec:
    # transformers shards the first of two small projections; its sum would mix ranks that hold different tokens.
    plan_changes = {f"{connection}.input_mix_weight_down": "replicated" for connection in CONNECTIONS}
    return corrected_spec(
        model, plan_changes, pointwise_containers=CONNECTIONS, head_sharded_blocks={BLOCK: OF_QWEN3_5}
    )


register_facts(
    "qwen4_exp_text",
    facts=TypeFacts(
        # The default has no indexer sizes, but every indexed attention layer builds one.
        defaults={
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        },
        no_gradient=SPARSE_INDEXER,
    ),
)
register_facts(
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
    facts=TypeFacts(
        # The default has no image start token, which position ids need. The default token ids also differ by 8, so they
        # would become one id in a tiny vocabulary.
        defaults={"vision_start_token_id": 151652, "audio_start_token_id": 151649},
        no_gradient_without=UNHEARD_AUDIO,
    ),
)
register_facts(
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_5_omni_text",
    facts=TypeFacts(
        # The default has no M-RoPE sections; the model then assumes the sections of a wide head.
        defaults={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}},
    ),
)
register_facts(
    "qwen2_audio_encoder",
    facts=TypeFacts(
        tiny={"max_source_positions": 16},
    ),
)
register_facts(
    "qwen2_5_omni_audio_encoder",
    facts=TypeFacts(
        no_gradient={r"\.audio_bos_eos_token\.": "read by no forward"},
    ),
)
register_facts(
    "qwen2",
    facts=TypeFacts(
        variants=[{"num_key_value_heads": 2}, {"use_sliding_window": True, "max_window_layers": 16}],
    ),
)
register_facts(
    "qwen2_moe",
    facts=TypeFacts(
        variants=[
            {"norm_topk_prob": True},
            {"mlp_only_layers": [0]},
            {"num_key_value_heads": 4},
            {"qkv_bias": False},
        ],
    ),
)
register_facts(
    "qwen3",
    facts=TypeFacts(
        variants=[
            {"num_key_value_heads": 8},
            {"attention_bias": True},
            {"use_sliding_window": True, "max_window_layers": 16},
        ],
    ),
)
register_facts(
    "qwen3_moe",
    facts=TypeFacts(
        variants=[{"norm_topk_prob": True}, {"mlp_only_layers": [0]}, {"attention_bias": True}],
    ),
)

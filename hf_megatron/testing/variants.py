"""What is compared beside a type's default config: tied and untied weights, and what popular checkpoints change."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from .tiny_config import full_config

Changes = Mapping[str, Any]

# What changes the way through the code; sizes do not, but for numbers of key/value heads below those of ranks.
VARIANTS: Mapping[str, Sequence[Changes]] = {
    "arcee": [{"attention_bias": True, "mlp_bias": True}],
    # With attention, as every checkpoint has it.
    "bamba": [{"attn_layer_indices": [9, 18, 27]}],
    "bloom": [{"apply_residual_connection_post_layernorm": True}],
    "cohere": [{"use_qk_norm": True}, {"attention_bias": True}],
    "cohere2": [{"attention_bias": True}],
    # Version 3, as all of its checkpoints are.
    "deberta-v2": [
        {
            **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256},
            **{"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
        }
    ],
    # Lite; the large one.
    "deepseek_v2": [
        {"q_lora_rank": None, "first_k_dense_replace": 1, "num_experts_per_tok": 6},
        {
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "num_experts_per_tok": 6,
        },
        {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    ],
    "deepseek_v3": [{"q_lora_rank": None, "n_group": 1, "topk_group": 1}, {"rope_interleave": False}],
    "ernie4_5": [{"use_bias": True}],
    "exaone4": [{"sliding_window": None}],
    # 40B; RW; 11B.
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 8},
        {"new_decoder_architecture": True, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1},
        {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False},
        {"multi_query": False},
    ],
    "gemma": [{"num_key_value_heads": 1}],
    "gemma2": [{"attn_logit_softcapping": None, "final_logit_softcapping": None}],
    "gemma3_text": [{"num_key_value_heads": 1}],
    "gemma4_text": [
        {"num_kv_shared_layers": 12},
        {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10},
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    ],
    "glm": [{"attention_bias": False}, {"attention_bias": True}],
    "glm4": [{"attention_bias": True}],
    # Every third layer chooses the tokens that the next two read.
    "glm_moe_dsa": [{"indexer_types": ["full", "shared", "shared"] * 26}],
    "glm4_moe": [{"use_qk_norm": True}, {"attention_bias": True}],
    "gpt2": [{"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}, {"scale_attn_weights": False}],
    "gpt_neox": [{"use_parallel_residual": False}, {"attention_bias": False}],
    "granite": [{"attention_bias": True}, {"num_key_value_heads": 8}],
    "internlm3": [{"qkv_bias": True}],
    "llama": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "num_key_value_heads": 8},
        {"num_key_value_heads": 8},
        {"num_key_value_heads": 1},
    ],
    "mistral": [{"sliding_window": None}, {"num_key_value_heads": 1}],
    "mixtral": [{"sliding_window": 4096}],
    "olmo": [{"clip_qkv": 8.0}, {"num_key_value_heads": 8}],
    "olmo2": [{"num_key_value_heads": 8}],
    "olmoe": [{"clip_qkv": 8.0}, {"norm_topk_prob": True}],
    # 350M; Galactica.
    "opt": [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 512},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True},
    ],
    "phi": [{"qk_layernorm": True}],
    "phi3": [{"sliding_window": 2047}, {"num_key_value_heads": 8}],
    "qwen2": [{"num_key_value_heads": 2}, {"use_sliding_window": True, "max_window_layers": 16}],
    "qwen2_moe": [
        {"norm_topk_prob": True},
        {"mlp_only_layers": [0]},
        {"num_key_value_heads": 4},
        {"qkv_bias": False},
    ],
    "qwen3": [
        {"num_key_value_heads": 8},
        {"attention_bias": True},
        {"use_sliding_window": True, "max_window_layers": 16},
    ],
    "qwen3_moe": [{"norm_topk_prob": True}, {"mlp_only_layers": [0]}, {"attention_bias": True}],
    "seed_oss": [{"attention_bias": False}, {"attention_out_bias": True}],
    "smollm3": [{"attention_bias": True, "mlp_bias": True}],
    # 1.6B; 12B.
    "stablelm": [
        {"use_qkv_bias": True},
        {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 8},
        {"use_parallel_residual": True},
        {"qk_layernorm": True},
    ],
    "starcoder2": [{"sliding_window": 4096}, {"use_bias": False}],
    # 1.1 and its kin.
    "t5": [{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {"feed_forward_proj": "gated-gelu"}],
}


def variants_of(model_type: str, class_name: str) -> list[Changes]:
    """Lists what is changed of a type's default config, the tying of its weights first, where the class can be both."""
    return [*_tying(model_type, class_name), *VARIANTS.get(model_type, ())]


def _tying(model_type: str, class_name: str) -> list[Changes]:
    default = full_config(CONFIG_MAPPING[model_type]())
    flag = "tie_word_embeddings"
    try:
        changed = type(default).from_dict(default.to_dict() | {flag: not getattr(default, flag, False)})
    except StrictDataclassError:
        return []
    cls = getattr(transformers, class_name)
    if not isinstance(default, cls.config_class):
        return []
    with torch.device("meta"):
        tied = [cls(config).all_tied_weights_keys for config in (default, changed)]
    return [] if tied[0] == tied[1] else [{flag: getattr(changed, flag)}]

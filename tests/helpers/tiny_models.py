"""Tiny models of every family that the converters support, with distinct tensors."""

import copy
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
)

VOCABULARY = 250

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_LATENT = {
    "num_hidden_layers": 3,
    # transformers' norms inside latent attention ignore the config and always use this value.
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_NEOX = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rotary_pct": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "feed_forward_proj": "gated-gelu",
    # As in T5 1.1: the config class only disables scaling of the head's input, and still ties the weights.
    "tie_word_embeddings": False,
}
_MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 4,
    "chunk_size": 8,
}
_NEMOTRON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "chunk_size": 8,
    # Megatron's mixer has no lower limit; zero is not possible, since transformers takes the logarithm.
    "time_step_min": 1e-12,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 4,
    "routed_scaling_factor": 2.5,
}

# case -> (model type, config overrides)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama_tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama_mqa": ("llama", {**_LLAMA, "num_key_value_heads": 1}),
    "llama_bias": ("llama", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 8}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA, **_EXPERTS, "head_dim": 32}),
    "qwen3_moe_mixed": ("qwen3_moe", {**_LLAMA, **_EXPERTS, "mlp_only_layers": [0]}),
    "qwen2_moe": ("qwen2_moe", {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 48}),
    "mixtral": ("mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "phi3": ("phi3", _LLAMA),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", {**_NEOX, "use_parallel_residual": False}),
    "gpt_neox_parallel": ("gpt_neox", {**_NEOX, "use_parallel_residual": True}),
    "deepseek_v2": ("deepseek_v2", {**_LLAMA, **_LATENT, "routed_scaling_factor": 1.5}),
    "deepseek_v2_lite": ("deepseek_v2", {**_LLAMA, **_LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**_LLAMA, **_LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v3_halves": (
        "deepseek_v3",
        {**_LLAMA, **_LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_LLAMA,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 8,
            "rope_parameters": _YARN,
        },
    ),
    "gemma": ("gemma", {**_LLAMA, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_LLAMA, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {**_LLAMA, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 8}),
    "olmo2": ("olmo2", _LLAMA),
    "megatron_bert": (
        "megatron-bert",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "layer_norm_eps": 1e-5,
        },
    ),
    "t5": ("t5", _T5),
    "t5_tied": ("t5", _T5),
    "mt5": ("mt5", {**_T5, "num_decoder_layers": 2}),
    "mamba2": ("mamba2", _MAMBA),
    "mamba2_tied": ("mamba2", {**_MAMBA, "tie_word_embeddings": True}),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h_latent": ("nemotron_h", {**_NEMOTRON, "moe_latent_size": 32, "n_group": 2}),
}

_SECTION = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_IMAGE = {"image_size": 8, "patch_size": 4}
_CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, **_IMAGE}
_QWEN_TOWER = {"depth": 2, "num_heads": 4, "hidden_size": 32, "intermediate_size": 48, "patch_size": 4}
_QWEN3_TOWER = {**_QWEN_TOWER, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_QWEN3 = {**_LLAMA, "head_dim": 16, "rope_parameters": {**_SECTION, "mrope_interleaved": True}}


def _make_composite(text: dict[str, Any], vision: dict[str, Any], tied: bool = False, **further: Any) -> dict[str, Any]:
    """Returns a composite config; `tie_word_embeddings` is set in the outer config only."""
    inner = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    return {"text_config": inner, "vision_config": vision, "tie_word_embeddings": tied, **further}


_VL = {
    "qwen2_5_vl": ({**_LLAMA, "rope_parameters": _SECTION}, {**_QWEN_TOWER, "out_hidden_size": 64}, _TOKENS),
    "qwen3_vl": (_QWEN3, _QWEN3_TOWER, _TOKENS),
    "qwen3_vl_moe": ({**_QWEN3, **_EXPERTS}, _QWEN3_TOWER, _TOKENS),
    "llava": (
        {**_LLAMA, "model_type": "llama"},
        {**_CLIP, "model_type": "clip_vision_model"},
        {"image_token_id": 3, "image_seq_length": 4, "vision_feature_layer": -1},
    ),
    "gemma3_vl": (
        {**_LLAMA, "head_dim": 16, "sliding_window": 8},
        {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"image_token_id": 3, "boi_token_id": 5, "eoi_token_id": 6, "mm_tokens_per_image": 4},
    ),
}
# Image-text models: case -> (model type, config).
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}{'_tied' if tied else ''}": (
        "gemma3" if name == "gemma3_vl" else name,
        _make_composite(text, vision, tied, **further),
    )
    for name, (text, vision, further) in _VL.items()
    for tied in ((True,) if name == "gemma3_vl" else (False, True))
}


def make_config(case: str) -> Any:
    """Returns the config of a case."""
    model_type, changes = {**FAMILIES, **MULTIMODAL}[case]
    return AutoConfig.for_model(model_type, **copy.deepcopy(changes))


def build_tiny_model(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Builds a model with random norms and biases, so that swapped tensors are detected."""
    torch.manual_seed(0)
    config = make_config(case)
    config._attn_implementation = "eager"
    # Only the pretraining class has all modules of Megatron's BERT.
    model_class = AutoModelForPreTraining if config.model_type == "megatron-bert" else AutoModelForCausalLM
    if case in MULTIMODAL:
        model_class = AutoModelForImageTextToText
    if config.is_encoder_decoder:
        model_class = AutoModelForSeq2SeqLM
    model = model_class.from_config(config).eval()
    if config.is_encoder_decoder and not case.endswith("_tied"):
        # Released files have a separate lm_head, so transformers does not tie it.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1:
                tensor.add_(noise * 0.1)
            elif "gate.weight" in name or "router" in name:
                tensor.copy_(noise * 0.3)
            elif "experts" in name:
                tensor.copy_(noise * 0.05)
    return model.to(dtype)

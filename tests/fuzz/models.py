"""Tiny models of several types and the features that a random case may enable."""

import random
from collections.abc import Mapping
from typing import Any

_LLAMA = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.2}
_WINDOW = {"sliding_window": (4, 64)}
_KV = {"num_key_value_heads": (1, 2, 4)}
_BIASES = {"attention_bias": (False, True), "mlp_bias": (False, True)}
# The grouped matmul of experts requires multiples of 16 bytes.
_GROUPED = {"intermediate_size": (48, 40)}
_TIED = {"tie_word_embeddings": (False, True)}
_GEMMA = {**_LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
_SPECIAL = {"vocab_size": 67, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ATTENTION = ("decoder", "positions", "kwargs")

# Model type -> config, variable fields (simplest value first) and features that loop patterns may need.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"config": _LLAMA, "varies": {**_TIED, **_KV, **_BIASES, "head_dim": (8, 12)}, "has": _ATTENTION},
    "qwen2": {"config": _LLAMA, "varies": {**_TIED, **_KV}, "has": _ATTENTION},
    "qwen3": {
        "config": {**_LLAMA, "head_dim": 8},
        "varies": {**_TIED, **_KV, "attention_bias": (False, True)},
        "has": _ATTENTION,
    },
    "mistral": {"config": {**_LLAMA, "sliding_window": 64}, "varies": {**_KV, **_WINDOW}, "has": _ATTENTION},
    "gemma2": {"config": {**_GEMMA, "final_logit_softcapping": 2.0}, "varies": {**_TIED, **_KV}, "has": _ATTENTION},
    "gemma3_text": {"config": _GEMMA, "varies": {**_TIED, **_KV}, "has": _ATTENTION},
    "gpt2": {
        "config": {
            **_SPECIAL,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        "varies": {"scale_attn_by_inverse_layer_idx": (False, True)},
        "has": _ATTENTION,
    },
    "gpt_neox": {
        "config": {**_LLAMA, "rotary_pct": 0.5},
        "varies": {**_TIED, "use_parallel_residual": (True, False), "attention_bias": (True, False)},
        "has": _ATTENTION,
        "weight": 3,
    },
    "mixtral": {
        "config": {**_LLAMA, **_EXPERTS, "num_local_experts": 4, "sliding_window": None},
        "varies": {**_KV, "router_jitter_noise": (0.0, 0.3), "output_router_logits": (False, True), **_GROUPED},
        "has": (*_ATTENTION, "experts", "jitter"),
        "weight": 3,
    },
    "qwen3_moe": {
        "config": {**_LLAMA, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
        "varies": {**_KV, "output_router_logits": (False, True), "norm_topk_prob": (False, True)},
        "has": (*_ATTENTION, "experts"),
        "weight": 2,
    },
    "opt": {
        "config": {
            **_SPECIAL,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
        "varies": {"enable_bias": (True, False), "do_layer_norm_before": (True, False)},
        "has": ("decoder",),
    },
    "bloom": {
        "config": {
            **_SPECIAL,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "varies": {},
        "has": ("decoder",),
    },
    "bert": {
        "config": {
            **_SPECIAL,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "num_labels": 3,
        },
        "varies": {"tie_word_embeddings": (True, False)},
        "tasks": ("masked", "classification", "tokens"),
        "has": (),
        "weight": 3,
    },
    "t5": {
        "config": {
            **_SPECIAL,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "varies": {"tie_word_embeddings": (True, False), "feed_forward_proj": ("relu", "gated-gelu")},
        "tasks": ("seq2seq",),
        "has": (),
        "weight": 2,
    },
}
# Sizes not divisible by the number of ranks, for types that have the field.
_ODD = {
    "vocab_size": (67, 66, 131),
    "intermediate_size": (48, 46, 45),
    "ffn_dim": (48, 46),
    "d_ff": (48, 46),
    "num_hidden_layers": (2, 3),
    "n_layer": (2, 3),
}
CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
# Dropout probabilities: rarely drawn, since a random case is only compared between ranks.
_DROPOUT = ("attention_dropout", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "dropout", "dropout_rate")


def simplest(name: str) -> dict[str, Any]:
    """Returns a model without optional features."""
    entry = MODELS[name]
    task = entry.get("tasks", ("causal",))[0]
    return {"type": name, "task": task, "class": CLASSES[task], "config": dict(entry["config"])}


def draw_features(chance: random.Random, names: list[str]) -> dict[str, Any]:
    """Draws a model type, a task and a config."""
    name = chance.choices(names, [MODELS[name].get("weight", 1) for name in names])[0]
    entry = MODELS[name]
    model = simplest(name)
    model["task"] = chance.choice(entry.get("tasks", ("causal",) * 24 + ("classification",)))
    model["class"] = CLASSES[model["task"]]
    if model["task"] == "classification":
        model["config"]["num_labels"] = 3
    if "experts" in entry["has"]:
        odd = {name: values for name, values in _ODD.items() if name != "intermediate_size"}
    else:
        odd = dict(_ODD)
    for field, values in {**odd, **entry["varies"]}.items():
        if field in entry["varies"] or field in model["config"]:
            model["config"][field] = chance.choice(values) if chance.random() < 0.6 else values[0]
    if chance.random() < 0.06:
        field = next((field for field in _DROPOUT if field in model["config"]), "attention_dropout")
        model["config"][field] = 0.2
    return model


def is_random(config: Mapping[str, Any]) -> bool:
    """Returns whether a model draws random numbers in training."""
    fields = (*_DROPOUT, "attn_pdrop", "embd_pdrop", "attention_probs_dropout_prob", "router_jitter_noise")
    return any(config.get(field) for field in fields)


def has(model: Mapping[str, Any], need: str) -> bool:
    """Returns whether the model has a feature that a loop pattern needs."""
    if need == "causal":
        return model["task"] == "causal"
    if need == "fp32":
        return model["dtype"] == "float32"
    return need in MODELS[model["type"]]["has"]

"""Builder of a megatron-core GPTModel with the local spec (no TransformerEngine) from a transformers config."""

import argparse
import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

ON_CPU = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


class Unsupported(ValueError):
    """Raised for models that megatron-core 0.16.1 does not support."""


@dataclass
class Settings:
    """Arguments of TransformerConfig and of GPTModel for one transformers config."""

    config: dict
    model: dict
    attributes: dict = field(default_factory=dict)  # read with getattr, but not dataclass fields of the config
    embedding_scale: float | None = None


@dataclass
class Layout:
    """Parallel layout of one launch."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sp: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


def make_settings(hf) -> Settings:
    """Returns the megatron-core settings equivalent to the transformers config `hf`."""
    if hf.model_type not in FAMILIES:
        raise Unsupported(f"model type {hf.model_type}: {REASONS.get(hf.model_type, 'not in the table of the peer')}")
    return FAMILIES[hf.model_type](hf)


def build_model(hf, padded_vocab: int, layout: Layout, keys: str = "te", mtp_layers: int | None = None) -> GPTModel:
    """Builds the local model of this rank.

    Args:
        keys: Sharded names of the TransformerEngine spec ("te") or of the local spec ("local").
        mtp_layers: Number of multi-token prediction layers, which have the structure of the last decoder layer.
    """
    peer_settings = make_settings(hf)
    mla = "kv_lora_rank" in peer_settings.config
    config = (MLATransformerConfig if mla else TransformerConfig)(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sp,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        mtp_num_layers=mtp_layers,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **ON_CPU,
        **peer_settings.config,
    )
    for name, value in peer_settings.attributes.items():
        setattr(config, name, value)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    if config.sequence_parallel or config.layernorm_zero_centered_gamma:
        _replace_norms(spec)
    if mla:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _LatentCoreAttention
    if keys == "te":
        for layer in spec.layer_specs:
            layer.submodules.sharded_state_dict_keys_map = te_keys(
                mla, moe=layer.submodules.mlp.module is MoELayer, attention=layer.submodules.self_attention.submodules
            )
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_vocab,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp_layers else None,
        **peer_settings.model,
    )
    if config.num_moe_experts and config.add_bias_linear:
        for name, module in model.named_modules():
            if ".local_experts." in name and name.endswith("linear_fc2"):
                # MLP adds the bias in place, which autograd does not allow on an output that is a view.
                module.register_forward_hook(lambda module, args, output: (output[0].clone(), output[1]))
    if peer_settings.embedding_scale is not None and model.pre_process:
        model.embedding.register_forward_hook(lambda module, args, output: output * peer_settings.embedding_scale)
    return model


def reject_wrong_gradients(config) -> None:
    """Raises for layouts on which the local spec has gradients that differ from the single-rank model (measured)."""
    tp, moe = config.tensor_model_parallel_size, config.num_moe_experts is not None
    if tp == 1:
        return
    if config.multi_latent_attention:
        # The rope part of the key is gathered without a reduction of its gradient (multi_latent_attention.py).
        raise Unsupported("gradients of MLA in the local spec under tensor parallelism")
    if moe and config.add_bias_linear:
        # Expert biases are marked for the all-reduce of sequence parallelism (tensor_parallel/layers.py).
        raise Unsupported("gradients of biased experts under tensor parallelism")
    if moe and config.expert_model_parallel_size * config.expert_tensor_parallel_size < tp:
        # Experts that are replicated over tensor ranks are reduced like dense weights.
        raise Unsupported("gradients of experts that are neither split nor distributed over the tensor ranks")


def te_keys(mla: bool, moe: bool, attention) -> dict:
    """Returns checkpoint names of the TransformerEngine spec, which fuses norms into linears, by local norm name."""
    names = {} if mla else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not moe:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    if mla:
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
        if attention.q_layernorm is not IdentityOp:
            names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
    return names


class _LatentCoreAttention(DotProductAttention):
    """Attention that ignores the head sizes passed by MLASelfAttention, which only TransformerEngine accepts."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


class RMSNorm(torch.nn.Module):
    """RMSNorm with zero-centered weights and sequence parallelism, which WrappedTorchNorm does not support."""

    def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
        super().__init__()
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden):
        return F.rms_norm(hidden, self.weight.shape, self.weight + self.offset, self.eps)


class _LayerNorm(RMSNorm):
    """LayerNorm with the same options."""

    def __init__(self, config, hidden_size, eps=1e-5, **kwargs):
        super().__init__(config, hidden_size, eps)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias.sequence_parallel = config.sequence_parallel

    def forward(self, hidden):
        return F.layer_norm(hidden, self.weight.shape, self.weight + self.offset, self.bias, self.eps)


def _norm(config, hidden_size, eps=1e-5, **kwargs):
    return (RMSNorm if config.normalization == "RMSNorm" else _LayerNorm)(config, hidden_size, eps)


class _Norm:
    """Norm of the configured kind, as a class because `build_module` expects one."""

    def __new__(cls, **kwargs):
        return _norm(**kwargs)


def _replace_norms(spec) -> None:
    spec.layer_norm = _Norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
        attention = layer.submodules.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention, name, IdentityOp) not in (IdentityOp, None):
                setattr(attention, name, _Norm)


# --- from a transformers config -------------------------------------------------------------------------------------


def _decoder(hf) -> Settings:
    """Returns the settings shared by llama-like models."""
    result = _make_base_settings(hf)
    _set_positions(hf, result)
    _set_windows(hf, result)
    return result


def _make_base_settings(hf) -> Settings:
    """Returns the llama-like settings without positions and sliding window."""
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return Settings(
        config={
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": head_dim,
            "layernorm_epsilon": hf.rms_norm_eps,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": _get_activation(hf.hidden_act),
            "add_bias_linear": False,
        },
        model={
            "max_sequence_length": hf.max_position_embeddings,
            "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        },
    )


def _get_activation(name: str):
    if name not in ACTIVATIONS:
        raise Unsupported(f"activation {name}")
    return ACTIVATIONS[name]


def _set_positions(hf, result: Settings) -> None:
    """Sets the rotary embedding, except for MLA."""
    rope = hf.rope_parameters
    kind = rope.get("rope_type", "default")
    model = result.model
    model["position_embedding_type"] = "rope"
    model["rotary_base"] = rope["rope_theta"]
    model["rotary_percent"] = rope.get("partial_rotary_factor", 1.0)
    if kind == "linear":
        model["seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        # Only the factor is an argument; the rest is hard-coded in rotary_pos_embedding.py (_apply_scaling).
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if any(rope[name] != value for name, value in fixed.items()):
            raise Unsupported(f"llama3 rope other than {fixed}")
        model["rope_scaling"], model["rope_scaling_factor"] = True, rope["factor"]
    elif kind == "yarn":
        model["position_embedding_type"] = "yarn"
        yarn = _yarn(hf)
        result.attributes |= {f"yarn_{name}": value for name, value in yarn.items()}
        result.attributes["yarn_correction_range_round_to_int"] = rope.get("truncate", True)
    elif kind != "default":
        raise Unsupported(f"rope type {kind}")


def _yarn(hf) -> dict:
    rope = hf.rope_parameters
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None or (mscale_all_dim and not mscale):
        raise Unsupported("yarn with attention_factor, or with mscale_all_dim alone")
    both = bool(mscale and mscale_all_dim)  # otherwise transformers scales by the factor alone
    return {
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": float(mscale) if both else 1.0,
        "mscale_all_dim": float(mscale_all_dim) if both else 0.0,
    }


def _set_windows(hf, result: Settings) -> None:
    """Sets the sliding window: transformers counts the token itself, megatron-core does not."""
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    slides = [kind == "sliding_attention" for kind in types] if types else [bool(window)] * hf.num_hidden_layers
    if window and any(slides):
        result.config["window_size"] = (window - 1, 0)
        if not all(slides):
            result.config["window_attn_skip_freq"] = [int(slide) for slide in slides]


def _set_experts(
    result: Settings, *, count: int, ffn: int, top_k: int, sparse: list[bool] | None = None, **more
) -> None:
    result.config |= {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": ffn,
        "moe_router_topk": top_k,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        **more,
    }
    if sparse is not None and not all(sparse):
        result.config["moe_layer_freq"] = [int(layer) for layer in sparse]


def _llama(hf) -> Settings:
    result = _decoder(hf)
    if getattr(hf, "attention_bias", False) or getattr(hf, "mlp_bias", False):
        if not (hf.attention_bias and hf.mlp_bias):
            raise Unsupported("biases in attention only or in the MLP only: add_bias_linear switches both")
        result.config["add_bias_linear"] = True
    return result


def _mistral(hf) -> Settings:
    return _decoder(hf)


def _qwen2(hf) -> Settings:
    result = _decoder(hf)
    result.config["add_qkv_bias"] = True
    return result


def _qwen3(hf) -> Settings:
    result = _decoder(hf)
    result.config |= {"qk_layernorm": True, "add_qkv_bias": hf.attention_bias}
    if hf.attention_bias:
        raise Unsupported("attention_bias: its bias of o_proj has no switch of its own")
    return result


def _sparse_layers(hf) -> list[bool]:
    return [
        i not in (hf.mlp_only_layers or []) and (i + 1) % hf.decoder_sparse_step == 0
        for i in range(hf.num_hidden_layers)
    ]


def _qwen3_moe(hf) -> Settings:
    result = _qwen3(hf)
    _set_experts(
        result,
        count=hf.num_experts,
        ffn=hf.moe_intermediate_size,
        top_k=hf.num_experts_per_tok,
        sparse=_sparse_layers(hf),
        moe_router_pre_softmax=not hf.norm_topk_prob,
    )
    return result


def _qwen2_moe(hf) -> Settings:
    result = _decoder(hf)
    result.config["add_qkv_bias"] = hf.qkv_bias
    _set_experts(
        result,
        count=hf.num_experts,
        ffn=hf.moe_intermediate_size,
        top_k=hf.num_experts_per_tok,
        sparse=_sparse_layers(hf),
        moe_router_pre_softmax=not hf.norm_topk_prob,
        moe_shared_expert_intermediate_size=hf.shared_expert_intermediate_size,
        moe_shared_expert_gate=True,
    )
    return result


def _mixtral(hf) -> Settings:
    result = _decoder(hf)
    _set_experts(result, count=hf.num_local_experts, ffn=hf.intermediate_size, top_k=hf.num_experts_per_tok)
    return result


def _gpt_oss(hf) -> Settings:
    result = _decoder(hf)
    result.config |= {
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": hf.swiglu_limit,
    }
    if hf.swiglu_alpha != 1.702 or not hf.attention_bias:
        raise Unsupported("swiglu_alpha is the constant 1.702 of quick_gelu, and add_bias_linear covers attention too")
    _set_experts(result, count=hf.num_local_experts, ffn=hf.intermediate_size, top_k=hf.num_experts_per_tok)
    return result


def _deepseek(hf) -> Settings:
    """Returns the settings of multi-latent attention and shared experts, with dense layers first."""
    result = _make_base_settings(hf)
    rope = hf.rope_parameters
    kind = rope.get("rope_type", "default")
    if hf.attention_bias:
        raise Unsupported("MLA linears have no bias")
    result.config |= {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        # The local attention sizes its output by kv_channels (dot_product_attention.py, hidden_size_per_partition).
        "kv_channels": hf.v_head_dim,
        "num_query_groups": hf.num_attention_heads,
        "qk_layernorm": True,
        "rotary_base": rope["rope_theta"],
        "rope_type": "rope",
        # The softmax scale reads this also for plain rope.
        "rotary_scaling_factor": 1.0,
    }
    if kind == "yarn":
        result.config |= _yarn(hf) | {"rope_type": "yarn"}
    elif kind != "default":
        raise Unsupported(f"rope type {kind} with MLA")
    result.model["position_embedding_type"] = "rope"
    _set_experts(
        result,
        count=hf.n_routed_experts,
        ffn=hf.moe_intermediate_size,
        top_k=hf.num_experts_per_tok,
        sparse=[i >= hf.first_k_dense_replace for i in range(hf.num_hidden_layers)],
        moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
        moe_router_topk_scaling_factor=hf.routed_scaling_factor,
    )
    return result


def _deepseek_v2(hf) -> Settings:
    result = _deepseek(hf)
    result.config["moe_router_pre_softmax"] = True
    if hf.topk_method == "group_limited_greedy":
        # transformers ranks a group by its best expert, megatron-core by the sum of its best top_k // groups experts.
        if hf.num_experts_per_tok // hf.topk_group != 1:
            raise Unsupported("group_limited_greedy with more than one expert per group")
        result.config |= {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return result


def _deepseek_v3(hf) -> Settings:
    result = _deepseek(hf)
    result.config |= {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # transformers does not train the bias
        "moe_router_dtype": "fp32",
    }
    if not hf.norm_topk_prob:
        raise Unsupported("norm_topk_prob=False: the sigmoid router always normalizes")
    if hf.n_group > 1:
        # transformers ranks a group by the sum of its two best experts.
        if hf.num_experts_per_tok // hf.topk_group != 2:
            raise Unsupported("groups with other than two experts per token each")
        result.config |= {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return result


def _phi3(hf) -> Settings:
    return _decoder(hf)


def _gemma(hf) -> Settings:
    """Returns settings with zero-centered norms and scaled embeddings; this module adds both to the local spec."""
    result = _decoder(hf)
    if hf.attention_bias:
        raise Unsupported("attention_bias: its bias of o_proj has no switch of its own")
    result.config["layernorm_zero_centered_gamma"] = True
    result.embedding_scale = hf.hidden_size**0.5
    return result


def _gpt2(hf) -> Settings:
    if hf.scale_attn_by_inverse_layer_idx or not hf.scale_attn_weights:
        raise Unsupported("attention scores scaled by layer, or not scaled")
    return Settings(
        config={
            "num_layers": hf.n_layer,
            "hidden_size": hf.n_embd,
            "ffn_hidden_size": hf.n_inner or 4 * hf.n_embd,
            "num_attention_heads": hf.n_head,
            "num_query_groups": hf.n_head,
            "kv_channels": hf.n_embd // hf.n_head,
            "layernorm_epsilon": hf.layer_norm_epsilon,
            "normalization": "LayerNorm",
            "activation_func": _get_activation(hf.activation_function),
            "add_bias_linear": True,
        },
        model={
            "max_sequence_length": hf.n_positions,
            "share_embeddings_and_output_weights": hf.tie_word_embeddings,
            "position_embedding_type": "learned_absolute",
        },
    )


def _gpt_neox(hf) -> Settings:
    if hf.use_parallel_residual:
        raise Unsupported("use_parallel_residual: TransformerLayer has attention and MLP in sequence only")
    if not hf.attention_bias:
        raise Unsupported("biases in the MLP only")
    result = Settings(
        config={
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_attention_heads,
            "kv_channels": hf.hidden_size // hf.num_attention_heads,
            "layernorm_epsilon": hf.layer_norm_eps,
            "normalization": "LayerNorm",
            "activation_func": _get_activation(hf.hidden_act),
            "add_bias_linear": True,
        },
        model={
            "max_sequence_length": hf.max_position_embeddings,
            "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        },
    )
    _set_positions(hf, result)
    return result


def _starcoder2(hf) -> Settings:
    if not hf.use_bias:
        raise Unsupported("LayerNorm with bias but linears without are not in the table of the peer")
    result = Settings(
        config={
            "num_layers": hf.num_hidden_layers,
            "hidden_size": hf.hidden_size,
            "ffn_hidden_size": hf.intermediate_size,
            "num_attention_heads": hf.num_attention_heads,
            "num_query_groups": hf.num_key_value_heads,
            "kv_channels": hf.hidden_size // hf.num_attention_heads,
            "layernorm_epsilon": hf.norm_epsilon,
            "normalization": "LayerNorm",
            "activation_func": _get_activation(hf.hidden_act),
            "add_bias_linear": True,
        },
        model={
            "max_sequence_length": hf.max_position_embeddings,
            "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        },
    )
    _set_positions(hf, result)
    _set_windows(hf, result)
    return result


FAMILIES = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "starcoder2": _starcoder2,
}
REASONS = {
    "gemma2": "no norms after attention and MLP, no soft-capping",
    "gemma3_text": "no norms after attention and MLP, one rope base for all layers",
    "olmo2": "no norms after attention and MLP, q/k norms per head only",
}


def megatron_args(hf, padded_vocab: int, layout: Layout) -> argparse.Namespace:
    """Returns the `args` that Megatron-LM would store with this model, as far as a converter may read them."""
    peer_settings = make_settings(hf)
    config, model = peer_settings.config, peer_settings.model
    mla = "kv_lora_rank" in config
    window = config.get("window_size")
    values = {
        "num_layers": config["num_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["ffn_hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": not mla and config["num_query_groups"] != config["num_attention_heads"],
        "num_query_groups": config["num_query_groups"],
        "kv_channels": config["kv_channels"],
        "max_position_embeddings": model["max_sequence_length"],
        "seq_length": model["max_sequence_length"],
        "position_embedding_type": model["position_embedding_type"],
        "rotary_base": model.get("rotary_base", config.get("rotary_base", 10000)),
        "rotary_percent": model.get("rotary_percent", 1.0),
        "rotary_interleaved": False,
        "use_rope_scaling": model.get("rope_scaling", False),
        "rope_scaling_factor": model.get("rope_scaling_factor", 8.0),
        "rotary_seq_len_interpolation_factor": model.get("seq_len_interpolation_factor"),
        "normalization": config["normalization"],
        "norm_epsilon": config["layernorm_epsilon"],
        "layernorm_epsilon": config["layernorm_epsilon"],
        "apply_layernorm_1p": config.get("layernorm_zero_centered_gamma", False),
        "swiglu": config.get("gated_linear_unit", False) and config["activation_func"] is F.silu,
        "quick_geglu": config["activation_func"] is quick_gelu,
        "glu_linear_offset": config.get("glu_linear_offset", 0.0),
        "activation_func_clamp_value": config.get("activation_func_clamp_value"),
        "softmax_type": config.get("softmax_type", "vanilla"),
        "window_size": window,
        "window_attn_skip_freq": config.get("window_attn_skip_freq"),
        "add_bias_linear": config["add_bias_linear"],
        "add_qkv_bias": config.get("add_qkv_bias", False),
        "qk_layernorm": config.get("qk_layernorm", False),
        "untie_embeddings_and_output_weights": not model["share_embeddings_and_output_weights"],
        "num_experts": config.get("num_moe_experts"),
        "moe_ffn_hidden_size": config.get("moe_ffn_hidden_size"),
        "moe_layer_freq": config.get("moe_layer_freq", 1),
        "moe_router_topk": config.get("moe_router_topk", 2),
        "moe_router_pre_softmax": config.get("moe_router_pre_softmax", False),
        "moe_router_score_function": config.get("moe_router_score_function", "softmax"),
        "moe_router_enable_expert_bias": config.get("moe_router_enable_expert_bias", False),
        "moe_router_topk_scaling_factor": config.get("moe_router_topk_scaling_factor"),
        "moe_router_num_groups": config.get("moe_router_num_groups"),
        "moe_router_group_topk": config.get("moe_router_group_topk"),
        "moe_shared_expert_intermediate_size": config.get("moe_shared_expert_intermediate_size"),
        "moe_shared_expert_gate": config.get("moe_shared_expert_gate", False),
        "moe_grouped_gemm": False,
        "multi_latent_attention": mla,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": None,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": 1,
        "sequence_parallel": layout.sp,
        "data_parallel_size": layout.dp,
        "world_size": layout.world,
        "vocab_size": hf.vocab_size,
        "padded_vocab_size": padded_vocab,
        "make_vocab_size_divisible_by": 1,
        "transformer_impl": "local",
        "ckpt_format": "torch_dist",
        "bf16": False,
        "fp16": False,
        "params_dtype": "torch.float32",
    }
    if mla:
        for name in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
            "rope_type",
            "rotary_scaling_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ):
            values[name] = config.get(name)
    return argparse.Namespace(**values)

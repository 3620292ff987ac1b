"""megatron-core 0.16.1's own tensor-parallel GPT model on CPU with gloo, with the weights of a transformers Llama.

megatron-core expects CUDA. `pretend_cuda` replaces the torch functions that it uses, for the whole process: call it
only in a dedicated worker process. The layers are megatron-core's local ones, because TransformerEngine needs CUDA.
"""

import contextlib
import os
import warnings

import torch


class _NoStream:
    """Placeholder for CUDA streams and events: nothing is asynchronous on CPU."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def pretend_cuda():
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # megatron-core writes device=torch.cuda.current_device()
    for name in ("synchronize", "empty_cache", "manual_seed", "set_rng_state"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args, **kwargs: None
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: _NoStream()
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def build_gpt_model(config, dtype, ranks, sequence_length):
    pretend_cuda()
    warnings.simplefilter("ignore")  # a dozen warnings per process about TransformerEngine and Apex, which need CUDA
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by the column-parallel layers
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.transformer_config import TransformerConfig

    megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    megatron_random.model_parallel_cuda_manual_seed(0)
    megatron_config = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Every fusion below is a CUDA kernel.
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        megatron_config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=config.vocab_size,
        max_sequence_length=sequence_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
    )


def load_llama_weights(model, config, state_dict, rank, ranks):
    """Copies this rank's slices of a transformers state dict into megatron-core's fused parameters."""

    def rows(name):
        return state_dict[name + ".weight"].chunk(ranks, 0)[rank]

    def columns(name):
        return state_dict[name + ".weight"].chunk(ranks, 1)[rank]

    state = {
        "embedding.word_embeddings.weight": rows("model.embed_tokens"),
        "decoder.final_layernorm.weight": state_dict["model.norm.weight"],
        "output_layer.weight": rows("lm_head"),
    }
    for i in range(config.num_hidden_layers):
        source, target = f"model.layers.{i}.", f"decoder.layers.{i}."
        # megatron-core groups the rows of the fused projection by KV group: its queries, its key, its value.
        groups = config.num_key_value_heads // ranks
        qkv = [rows(f"{source}self_attn.{x}_proj").reshape(groups, -1, config.hidden_size) for x in "qkv"]
        state |= {
            target + "input_layernorm.weight": state_dict[source + "input_layernorm.weight"],
            target + "self_attention.linear_qkv.weight": torch.cat(qkv, 1).flatten(0, 1),
            target + "self_attention.linear_proj.weight": columns(source + "self_attn.o_proj"),
            target + "pre_mlp_layernorm.weight": state_dict[source + "post_attention_layernorm.weight"],
            target + "mlp.linear_fc1.weight": torch.cat([rows(f"{source}mlp.{x}_proj") for x in ("gate", "up")]),
            target + "mlp.linear_fc2.weight": columns(source + "mlp.down_proj"),
        }
    result = model.load_state_dict(state, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith("_extra_state")]
    if missing or result.unexpected_keys:
        raise RuntimeError(f"weights do not fit megatron-core: missing {missing}, unexpected {result.unexpected_keys}")

"""Logits of megatron-core's MambaModel with converted weights: `python -m tests.megatron_peer.mamba HF OUT LAYOUT
FOLDER...`.

HF is the folder of a transformers Mamba2 or Nemotron-H, FOLDER an iteration folder in `torch_dist` or in the legacy
format with local names. LAYOUT is the tensor-parallel size or `TPxPP`. OUT is a safetensors file with the logits per
FOLDER, `0` and so on, for the input `ids` in HF/inputs.safetensors. megatron-core saves the last model again, into
OUT-core and OUT-legacy.
"""

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Compiling the activations, which are wrapped in torch.compile, would dominate the run time.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402

from tests.megatron_peer.patches import patch_megatron, patch_torch  # noqa: E402
from tests.megatron_peer.state_space import provide_mamba_ssm  # noqa: E402

patch_torch()
provide_mamba_ssm()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.models.mamba.mamba_model import MambaModel  # noqa: E402
from megatron.core.ssm import mamba_block  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from tests.megatron_peer.checkpoints import load, run_on_ranks, run_through_stages, save  # noqa: E402
from tests.megatron_peer.models import ON_CPU, RMSNorm  # noqa: E402

patch_megatron()
mamba_block.TENorm = RMSNorm
PADDED = 256


def spec(experts: int | None) -> ModuleSpec:
    """Returns the stack of `mamba_layer_specs.py` with local layers, saved under TransformerEngine's names."""
    parallel = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    return ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=RMSNorm,
                    mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
                    mamba_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=RMSNorm,
                    self_attention=ModuleSpec(
                        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                    ),
                    self_attn_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=RMSNorm,
                    mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(**parallel)),
                    mlp_bda=get_bias_dropout_add,
                    sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
                ),
            ),
            moe_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=RMSNorm,
                    mlp=get_moe_module_spec(use_te=False, num_experts=experts or 1, moe_grouped_gemm=False),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
        ),
    )


def make_config_kwargs(hf) -> dict:
    """Returns the TransformerConfig arguments of the mixers, and of attention, MLP and MoE layers if present."""
    if hf.model_type == "mamba2":
        return {
            "mamba_num_heads": hf.num_heads,
            "mamba_head_dim": hf.head_dim,
            "mamba_state_dim": hf.state_size,
            # Required by the config, although there is no attention.
            "num_attention_heads": hf.num_heads,
        }
    config = {
        "mamba_num_heads": hf.mamba_num_heads,
        "mamba_head_dim": hf.mamba_head_dim,
        "mamba_state_dim": hf.ssm_state_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "ffn_hidden_size": hf.intermediate_size,
        "activation_func": squared_relu,
        "is_hybrid_model": True,
    }
    if "moe" in hf.layers_block_type:
        config |= {
            "num_moe_experts": hf.n_routed_experts,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": hf.moe_shared_expert_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
        }
    return config


def build(hf) -> MambaModel:
    config = TransformerConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # Experts are sharded like dense layers.
        expert_tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        mamba_num_groups=hf.n_groups,
        use_mamba_mem_eff_path=False,
        normalization="RMSNorm",
        layernorm_epsilon=hf.layer_norm_epsilon,
        add_bias_linear=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **ON_CPU,
        **make_config_kwargs(hf),
    )
    return MambaModel(
        config,
        spec(config.num_moe_experts),
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=getattr(hf, "hybrid_override_pattern", None),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        parallel_output=False,
    ).eval()


def run(hf: str, out: str, folders: list[str]) -> None:
    ids, outputs = load_file(Path(hf) / "inputs.safetensors")["ids"], {}
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    for index, folder in enumerate(folders):
        model = build(AutoConfig.from_pretrained(hf))
        load(model, Path(folder))
        logits = run_through_stages(model, (*ids.T.shape, model.config.hidden_size), ids, positions, None)
        if logits is not None:
            outputs[str(index)] = logits
    save(model, Path(f"{out}-core"), Path(f"{out}-legacy"))
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        save_file(outputs, out)


if __name__ == "__main__":
    hf, out, layout, *folders = sys.argv[1:]
    run_on_ranks(run, layout, hf, out, folders)

"""Tests of Megatron arguments that change the computation but no shape, against the Hugging Face config."""

import ast
import importlib.metadata
import re

import pytest
from transformers import AutoConfig

from hf_megatron import CheckpointError
from hf_megatron.conversion.families import get_family
from hf_megatron.conversion.families.positions import unstored_positions
from hf_megatron.conversion.megatron.arguments import NEUTRAL, OTHER_NAMES, check_arguments
from hf_megatron.conversion.write import get_format_notes
from tests.helpers.tiny_models import FAMILIES, make_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DIFFERENT_VALUES = {
    "llama": {
        "apply_layernorm_1p": True,
        "layernorm_zero_centered_gamma": True,
        "apply_residual_connection_post_layernorm": True,
        "qk_layernorm": True,
        "qk_l2_norm": True,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "squared_relu": True,
        "quick_geglu": True,
        "openai_gelu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "softmax_scale": 0.01,
        "softmax_type": "off-by-one",
        "window_size": (4, 0),
        "attention_output_gate": True,
        "multi_latent_attention": True,
        "experimental_attention_variant": "dsa",
        "linear_attention_freq": 4,
        "rotary_interleaved": True,
        "rotary_seq_len_interpolation_factor": 4,
        "use_rope_scaling": True,
        "position_embedding_type": "yarn",
        "no_rope_freq": 2,
        "mrope_section": [4, 4],
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "use_mup": True,
        "is_hybrid_model": True,
        "hybrid_override_pattern": "M*",
        "hybrid_layer_pattern": "M*M*",
        "hybrid_attention_ratio": 0.5,
        "hybrid_mlp_ratio": 0.5,
        "num_experts": 4,
        "num_moe_experts": 4,
        "heterogeneous_block_specs": True,
        "heterogeneous_layers_config_path": "layers.json",
        "heterogeneous_layers_config_encoded_json": "{}",
        "hetereogenous_dist_checkpoint": True,
    },
    "mistral": {"window_size": (8, 0), "window_attn_skip_freq": 2},
    "mixtral": {
        "moe_layer_freq": 2,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 2,
        "moe_router_topk_limited_devices": 2,
        "moe_router_enable_expert_bias": True,
        "moe_apply_probs_on_input": True,
        "moe_latent_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
    },
    "gpt2": {"squared_relu": True, "swiglu": True, "apply_residual_connection_post_layernorm": True},
    "gpt_neox": {"openai_gelu": True, "rotary_percent": 1.0},
    "deepseek_v3": {"moe_router_group_topk": 1, "rope_type": "yarn"},
    "gpt_oss": {"softmax_type": "vanilla", "position_embedding_type": "rope", "window_attn_skip_freq": 3},
}
# Fields of TransformerConfig that need no comparison: sizes visible in shapes, performance, precision, parallelism,
# randomness in training and initialization. Query-key layer scaling divides and multiplies by the layer number.
UNCOMPARED_FIELDS = re.compile(
    r"num_layers_in_|account_for_|pipeline_|mtp_|hidden_dropout|attention_dropout|fp32_residual|fp8|fp4"
    r"|recompute_|init_method|output_layer_init|embedding_init|init_model|cuda_graph|enable_cuda"
    r"|external_cuda|inference_|use_|masked_softmax|bias_activation|bias_dropout|persist_|memory_efficient"
    r"|apply_rope_fusion|fused_|distribute_|num_layers_at_|first_last|tp_only|kitchen_|mamba_"
    r"|linear_conv|linear_key|linear_value|linear_num|dsa_indexer|apply_query_key_layer_scaling"
    r"|attention_softmax_in_fp32|disable_|attention_backend|qk_clip|log_max|test_mode|calculate_per"
    r"|moe_router_load|moe_enable|moe_router_padding|moe_router_dtype|moe_router_bias_update"
    r"|moe_router_force|moe_grouped|moe_use_legacy|moe_aux|moe_z_loss|moe_input_jitter|moe_token|moe_flex"
    r"|moe_per_layer|moe_expert_capacity|moe_pad_expert|moe_layer_recompute|moe_permute|moe_router_fusion"
    r"|moe_deepep|moe_hybridep|moe_shared_expert_overlap|cp_comm|clone_scatter|config_logger|flash_decode"
    r"|batch_invariant|symmetric_ar|mlp_chunks|quant_recipe|transformer_impl|fine_grained|offload_"
    r"|min_offloaded|activation_func_fp8|activation_func|gated_linear|hidden_size"
    r"|num_layers"
)


def get_meaning(case: str) -> dict:
    config = make_config(case)
    return get_family(config).meaning(config)


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, others in DIFFERENT_VALUES.items() for name in others]
)
def test_argument_that_changes_computation_is_rejected(case, name):
    with pytest.raises(CheckpointError, match=f"{name} is .*, but .* in the config"):
        check_arguments({name: DIFFERENT_VALUES[case][name]}, get_meaning(case), "here")


def test_every_neutral_argument_has_a_rejection_case():
    covered = {OTHER_NAMES.get(name, name) for others in DIFFERENT_VALUES.values() for name in others}
    assert NEUTRAL.keys() <= covered, NEUTRAL.keys() - covered


@pytest.mark.parametrize("case", FAMILIES)
def test_stored_arguments_match_config(case):
    config = make_config(case)
    stored, expected = get_family(config).arguments(config), get_meaning(case)
    check_arguments(stored, expected, "here")
    # Values that Megatron-LM stores for unset arguments.
    check_arguments(
        {"rope_scaling_factor": 8.0, "moe_router_topk": 2} | dict.fromkeys(expected) | stored, expected, "here"
    )


def test_equivalent_arguments_are_accepted():
    llama = get_meaning("llama")
    same = {"rotary_seq_len_interpolation_factor": 1, "window_size": (-1, -1), "softmax_scale": 16**-0.5}
    check_arguments({**same, "window_attn_skip_freq": 2, "apply_query_key_layer_scaling": True}, llama, "here")
    check_arguments(
        {"openai_gelu": True, "rotary_interleaved": True, "add_qkv_bias": True}, get_meaning("gpt2"), "here"
    )
    check_arguments({"window_size": [7, 0], "window_attn_skip_freq": "([1,0]*1)"}, get_meaning("gpt_oss"), "here")
    check_arguments({"window_attn_skip_freq": 2}, get_meaning("gpt_oss"), "here")
    later = {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M-*|EME/*E"}
    check_arguments(
        {**later, "hybrid_attention_ratio": 0.2, "is_hybrid_model": False}, get_meaning("nemotron_h"), "here"
    )
    check_arguments({"hybrid_override_pattern": None}, get_meaning("mamba2"), "here")
    latent = {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "moe_router_pre_softmax": True}
    check_arguments({**latent, "position_embedding_type": "yarn"}, get_meaning("deepseek_v3"), "here")


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("mamba2", {"hybrid_attention_ratio": 0.5}),
        ("mamba2", {"hybrid_override_pattern": "M*"}),
        ("nemotron_h", {"hybrid_override_pattern": "MMMMMM"}),
        ("nemotron_h", {"hybrid_layer_pattern": "MMMMMM"}),
        ("nemotron_h", {"hybrid_override_pattern": None}),
        ("nemotron_h", {"mamba_num_groups": 8}),
        ("t5", {"softmax_scale": None}),
        ("t5", {"decoder_num_layers": 2}),
    ],
)
def test_arguments_distinguish_models_with_equal_shapes(case, found):
    with pytest.raises(CheckpointError, match=next(iter(found))):
        check_arguments(found, get_meaning(case), "here")


def test_rope_scaling_uses_megatron_argument_names():
    def make_arguments(**rope):
        config = AutoConfig.for_model("llama", rope_parameters=rope)
        return config, get_family(config).arguments(config)

    config, arguments = make_arguments(**LLAMA3)
    assert (arguments["use_rope_scaling"], arguments["rope_scaling_factor"]) == (True, 8.0)
    assert unstored_positions(config) is None and get_format_notes(config) == []
    _, plain = make_arguments(rope_type="default", rope_theta=5e5)
    for one, other in ((arguments, plain), ({**arguments, "rope_scaling_factor": 4.0}, arguments)):
        with pytest.raises(CheckpointError, match=r"rope_scaling"):
            check_arguments(one, other, "here")
    with pytest.raises(CheckpointError, match="use_rope_scaling is False, but True in the config"):
        check_arguments({"use_rope_scaling": False}, arguments, "here")
    config, _ = make_arguments(**LLAMA3 | {"original_max_position_embeddings": 16})
    assert "original_max_position_embeddings" in str(get_format_notes(config))
    config, _ = make_arguments(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    assert "'dynamic'" in str(get_format_notes(config))
    _, linear = make_arguments(rope_type="linear", rope_theta=1e4, factor=4.0)
    assert linear["rotary_seq_len_interpolation_factor"] == 4.0
    _, yarn = make_arguments(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
    assert (yarn["position_embedding_type"], yarn["yarn_rotary_scaling_factor"]) == ("yarn", 4.0)


def read_megatron_core_fields() -> dict[str, ast.expr | None]:
    """Returns the fields of Megatron-Core's TransformerConfig with the expressions of their defaults."""
    files = importlib.metadata.files("megatron-core") or []
    path = next(file.locate() for file in files if str(file).endswith("core/transformer/transformer_config.py"))
    classes = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == "TransformerConfig"]
    return {line.target.id: line.value for line in body if isinstance(line, ast.AnnAssign)}


def test_table_covers_all_transformer_config_fields():
    """Every TransformerConfig field is either compared or listed in `UNCOMPARED_FIELDS`."""
    fields = read_megatron_core_fields().keys()
    compared = NEUTRAL.keys() | OTHER_NAMES.keys() | set().union(*(get_meaning(case) for case in FAMILIES))
    unknown = {name for name in fields - compared if not UNCOMPARED_FIELDS.match(name)}
    assert len(fields) > 100 and not unknown


@pytest.mark.parametrize("case", FAMILIES)
def test_transformer_config_defaults_are_accepted(case):
    """The saved arguments of a run contain unset fields at their defaults."""
    fields = read_megatron_core_fields()
    defaults = {name: value.value for name, value in fields.items() if isinstance(value, ast.Constant)}
    assert len(defaults) > 80 and NEUTRAL.keys() & defaults.keys()
    config = make_config(case)
    check_arguments(defaults | get_family(config).arguments(config), get_meaning(case), "here")

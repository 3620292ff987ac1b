"""Comparison of the Megatron-LM arguments in a checkpoint with the ones derived from its config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...core.text import safe_repr
from ...errors import CheckpointError
from ..torch_files.safe_pickle import Record

# Every argument that changes a model's computation but not the shape of its weights, with its neutral value: the value
# assumed for a family that does not set it, and the meaning of `None`. Names are from Megatron-LM
# (megatron/training/arguments.py) and megatron-core 0.16.1 (transformer/transformer_config.py). Add new ones here.
NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        # norms and residuals
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        # linears and activations
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "swiglu": False,
        "squared_relu": False,
        "quick_geglu": False,
        "openai_gelu": False,
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        # attention
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "window_size": None,
        "window_attn_skip_freq": None,
        "attention_output_gate": False,
        "multi_latent_attention": False,
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        # positions
        "rotary_interleaved": False,
        "rotary_percent": 1.0,
        "rotary_seq_len_interpolation_factor": 1,
        "use_rope_scaling": False,
        "no_rope_freq": None,
        "mrope_section": None,
        # hybrid models with state space and attention layers
        "is_hybrid_model": False,
        "hybrid_override_pattern": None,
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        # experts
        "num_experts": None,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": 1.0,
        "moe_router_num_groups": 1,
        "moe_router_group_topk": 1,
        "moe_router_topk_limited_devices": None,
        "moe_router_enable_expert_bias": False,
        "moe_apply_probs_on_input": False,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        # multipliers and caps (after 0.16, and in Megatron-Bridge's providers), and layers that differ
        "use_mup": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "heterogeneous_block_specs": False,
        "heterogeneous_layers_config_path": None,
        "heterogeneous_layers_config_encoded_json": None,
        "hetereogenous_dist_checkpoint": False,
    }
)
# Fields of TransformerConfig with the same meaning.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "layernorm_epsilon": "norm_epsilon",
        "layernorm_zero_centered_gamma": "apply_layernorm_1p",
        "num_moe_experts": "num_experts",
        # after 0.16
        "hybrid_layer_pattern": "hybrid_override_pattern",
    }
)
# Types of rotary positions, with any scaling.
_ROTARY = ("rope", "yarn", "mrope")
_OF_ROTARY = frozenset(
    {
        "rotary_base",
        "no_rope_freq",
        "mrope_section",
        "use_rope_scaling",
        *(name for name in NEUTRAL if "rotary" in name),
    }
)
# Multi-latent attention has its own widths and scale.
_NOT_OF_LATENT = frozenset({"kv_channels", "num_query_groups", "group_query_attention", "softmax_scale"})
_MOST_SHOWN = 8


# Pickled class names of `parse_args` results and of their substitute.
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


def stored_arguments(content: Mapping[Any, Any], where: object) -> dict[Any, Any]:
    """Returns the Megatron-LM arguments stored in a checkpoint, empty if there are none.

    Args:
        content: the unsharded state, or the full content of a rank file.
        where: the file, for errors.

    Raises:
        CheckpointError: `args` is something else, so that there would be nothing to compare.
    """
    args = content.get("args")
    if args is None:
        return {}
    if isinstance(args, Record):
        if isinstance(args.state, dict):
            return args.state
        if args.state is None and args.kind in _NAMESPACES:
            return {}
    description = f"an object of {safe_repr(args.kind)}" if isinstance(args, Record) else safe_repr(args)
    raise CheckpointError(f"{where}: args is {description}, expected a namespace with Megatron-LM's arguments.")


def check_arguments(arguments: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Compares a checkpoint's arguments with its config, and with the values its family assumes by default.

    Weights with a different number of heads, rotary base, or norm centering have the same shapes, so they would load
    without an error as a different model.

    Args:
        arguments: arguments of the checkpoint; missing ones are not compared.
        expected: arguments of the config, as in `Family.meaning`; of `NEUTRAL` only the ones that differ.

    Raises:
        CheckpointError: naming each argument that differs, with both values.
    """
    expected = {**NEUTRAL, **expected}
    left_out = _left_out(expected)
    different = []
    for name, actual in arguments.items():
        known = OTHER_NAMES.get(name, name)
        if known not in expected or known in left_out or (actual is None and known != name):
            continue
        expected_value = expected[known]
        actual = NEUTRAL.get(known) if actual is None else actual
        if (actual is None or expected_value is None) and known not in NEUTRAL:
            continue
        if not _agrees(known, actual, expected_value, arguments, expected):
            different.append(f"{name} is {safe_repr(actual)}, but {safe_repr(expected_value)} in the config")
    if different:
        more = f" and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{where}: its arguments differ from the config: {'; '.join(different[:_MOST_SHOWN])}{more}. "
            "Use the config.json that the model was trained with."
        )


def get_argument_notes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns notes on arguments of the run that no config can express, or on missing arguments."""
    if not arguments:
        return ("the checkpoint has no Megatron arguments: only shapes were compared with the config",)
    factor = arguments.get("moe_expert_capacity_factor")
    if not arguments.get("num_experts") or not isinstance(factor, (int, float)) or factor < 0:
        return ()
    return (
        f"the run dropped tokens beyond each expert's moe_expert_capacity_factor={safe_repr(factor)}; transformers "
        "computes all of them",
    )


def _left_out(expected: Mapping[str, Any]) -> set[str]:
    """Returns the names of arguments that have no effect on this model."""
    # Rotary positions store no weights, and their maximum number affects no result.
    turning = expected.get("position_embedding_type") in _ROTARY
    left_out = {"max_position_embeddings"} if turning else set(_OF_ROTARY)
    if expected.get("position_embedding_type") == "none":
        left_out.add("max_position_embeddings")
    if expected["hybrid_override_pattern"] is not None:
        # The pattern defines all layers (ssm/mamba_hybrid_layer_allocation.py); without it, layers are mixers except
        # for the given ratios.
        left_out.add("is_hybrid_model")
        if not _mixers_alone(expected["hybrid_override_pattern"]):
            left_out |= {"hybrid_attention_ratio", "hybrid_mlp_ratio"}
    if expected["multi_latent_attention"]:
        left_out |= _NOT_OF_LATENT
    if expected["add_bias_linear"]:
        # add_bias_linear covers all linears.
        left_out.add("add_qkv_bias")
    if expected.get("num_experts") is None:
        left_out |= {name for name in expected if name.startswith("moe_")}
    if expected["moe_router_score_function"] != "softmax":
        left_out.add("moe_router_pre_softmax")
    if expected["moe_router_num_groups"] == 1:
        left_out.add("moe_router_group_topk")
    if expected["window_size"] is None:
        left_out.add("window_attn_skip_freq")
    return left_out


def _agrees(
    name: str, actual: Any, expected_value: Any, arguments: Mapping[str, Any], expected: Mapping[str, Any]
) -> bool:
    if name == "num_query_groups" and arguments.get("group_query_attention") is False:
        # Megatron-LM ignores its default of one group in this case.
        actual = expected.get("num_attention_heads")
    if name == "num_experts" and actual in (0, [1]):
        # Other versions describe a dense model this way.
        actual = None
    if name == "vocab_size" and type(actual) is int:
        # The config may include tokens added by the tokenizer; a smaller vocabulary would cut off trained rows.
        return actual <= expected_value
    if name == "position_embedding_type" and expected["multi_latent_attention"] and actual in _ROTARY:
        # With multi-latent attention, `rope_type` holds the type instead.
        actual = "rope"
    if name == "rope_type" and actual == "yarn" and arguments.get("rotary_scaling_factor") == 1:
        actual = "rope"
    if name == "openai_gelu" and actual is False:
        # The fused activation is the same approximation (fusions/fused_bias_gelu.py).
        return True
    if name == "hybrid_override_pattern":
        actual = arguments.get("hybrid_layer_pattern") if actual is None else actual
        # Bars separate pipeline stages, and MTP layers follow a slash.
        actual = actual.partition("/")[0].replace("|", "") if isinstance(actual, str) else actual
        return actual == expected_value or (actual is None and _mixers_alone(expected_value))
    if name == "softmax_scale":
        head_dim = expected.get("kv_channels")
        actual, expected_value = (
            head_dim**-0.5 if value is None and head_dim else value for value in (actual, expected_value)
        )
    if name == "window_size" and isinstance(actual, (list, tuple)) and actual[:1] in ([-1], (-1,)):
        actual = None
    if name in ("moe_layer_freq", "window_attn_skip_freq"):
        actual, expected_value = (
            _by_layer(name, value, expected.get("num_layers")) for value in (actual, expected_value)
        )
    if isinstance(expected_value, (int, float)) and isinstance(actual, (int, float)):
        return isinstance(actual, bool) is isinstance(expected_value, bool) and abs(
            actual - expected_value
        ) <= 1e-6 * abs(expected_value)
    if isinstance(expected_value, (list, tuple)):
        # A string is a pattern in Python syntax, which is not evaluated.
        return isinstance(actual, str) or (isinstance(actual, (list, tuple)) and list(actual) == list(expected_value))
    return type(actual) is type(expected_value) and bool(actual == expected_value)


def _mixers_alone(pattern: Any) -> bool:
    return isinstance(pattern, str) and set(pattern) == {"M"}


def _by_layer(name: str, value: Any, layers: Any) -> Any:
    """Expands a frequency to a list with one flag per layer for experts or windows (transformer/utils.py)."""
    if type(layers) is not int or type(value) not in (int, type(None)) or value == 0:
        return value
    if name == "moe_layer_freq":
        return [int(layer % value == 0) for layer in range(layers)]
    return [int(value is None or number % value != 0) for number in range(1, layers + 1)]

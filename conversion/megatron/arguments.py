"""Megatron-LM's own arguments in a checkpoint against those that its config says."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...core.text import safe_repr
from ...errors import CheckpointError
from ..torch_files.safe_pickle import Record

# Every argument that changes what a model computes and no shape of its weights, with the value at which it changes
# nothing: what a family means that does not state it, and what `None` stands for. Names are those of Megatron-LM
# (megatron/training/arguments.py) and of megatron-core 0.16.1 (transformer/transformer_config.py). A new one is a row.
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
        # layers of state space models among those of attention
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
        # what multiplies or caps (after 0.16, and of Megatron-Bridge's providers), and layers that differ
        "use_mup": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "heterogeneous_block_specs": False,
        "heterogeneous_layers_config_path": None,
        "heterogeneous_layers_config_encoded_json": None,
        "hetereogenous_dist_checkpoint": False,
    }
)
# The fields of TransformerConfig that say the same.
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "layernorm_epsilon": "norm_epsilon",
        "layernorm_zero_centered_gamma": "apply_layernorm_1p",
        "num_moe_experts": "num_experts",
        # After 0.16.
        "hybrid_layer_pattern": "hybrid_override_pattern",
    }
)
# Positions that turn, whatever rescales them.
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
# Multi-latent attention has widths and a scale of its own.
_NOT_OF_LATENT = frozenset({"kv_channels", "num_query_groups", "group_query_attention", "softmax_scale"})
_MOST_SHOWN = 8


# As pickles name what `parse_args` returns, and what stands for it.
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


def stored_arguments(content: Mapping[Any, Any], where: object) -> dict[Any, Any]:
    """Returns Megatron-LM's arguments that a checkpoint has beside its weights, none where it has none at all.

    Args:
        content: what is not sharded, or all of a rank.
        where: the file, for errors.

    Raises:
        CheckpointError: what it has under their name are no arguments, so that nothing would be compared.
    """
    found = content.get("args")
    if found is None:
        return {}
    if isinstance(found, Record):
        if isinstance(found.state, dict):
            return found.state
        if found.state is None and found.kind in _NAMESPACES:
            return {}
    said = f"an object of {safe_repr(found.kind)}" if isinstance(found, Record) else safe_repr(found)
    raise CheckpointError(f"{where}: args is {said}: expected a namespace of Megatron-LM's arguments.")


def check_arguments(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Compares a checkpoint's arguments with what a config says, and with what its family means by saying nothing.

    Weights of another number of heads, of another base of rotary positions, or with norms around zero have the same
    shapes and train on in silence as another model.

    Args:
        found: of the checkpoint; what it does not have is not compared.
        expected: of the config, as `Family.meaning` has them; of `NEUTRAL` those that differ.

    Raises:
        CheckpointError: naming each argument that differs and both values.
    """
    expected = {**NEUTRAL, **expected}
    left_out = _left_out(expected)
    different = []
    for name, given in found.items():
        known = OTHER_NAMES.get(name, name)
        if known not in expected or known in left_out or (given is None and known != name):
            continue
        wanted = expected[known]
        given = NEUTRAL.get(known) if given is None else given
        if (given is None or wanted is None) and known not in NEUTRAL:
            continue
        if not _is_identical(known, given, wanted, found, expected):
            different.append(f"{name} is {safe_repr(given)}, and {safe_repr(wanted)} by the config")
    if different:
        more = f" and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{where}: its own arguments are not those of the config: {'; '.join(different[:_MOST_SHOWN])}{more}. "
            "Convert it with the config.json that it was trained with."
        )


def notes_of_arguments(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a checkpoint's arguments say of its run that no config can say, or that there are none."""
    if not found:
        return ("no arguments of Megatron to compare the config with: only shapes were compared",)
    factor = found.get("moe_expert_capacity_factor")
    if not found.get("num_experts") or not isinstance(factor, (int, float)) or factor < 0:
        return ()
    return (
        f"the run dropped tokens beyond moe_expert_capacity_factor={safe_repr(factor)} of each expert, where "
        f"transformers "
        "computes all of them",
    )


def _left_out(expected: Mapping[str, Any]) -> set[str]:
    """Returns arguments that a model of these does not look at."""
    # Nothing is stored for positions that turn, and no number depends on how many there may be.
    turning = expected.get("position_embedding_type") in _ROTARY
    left_out = {"max_position_embeddings"} if turning else set(_OF_ROTARY)
    if expected.get("position_embedding_type") == "none":
        left_out.add("max_position_embeddings")
    if expected["hybrid_override_pattern"] is not None:
        # It says all (ssm/mamba_hybrid_layer_allocation.py); without one, layers are mixers but for what ratios say.
        left_out.add("is_hybrid_model")
        if not _mixers_alone(expected["hybrid_override_pattern"]):
            left_out |= {"hybrid_attention_ratio", "hybrid_mlp_ratio"}
    if expected["multi_latent_attention"]:
        left_out |= _NOT_OF_LATENT
    if expected["add_bias_linear"]:
        # All linears have a bias then.
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


def _is_identical(name: str, given: Any, wanted: Any, found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    if name == "num_query_groups" and found.get("group_query_attention") is False:
        # Megatron-LM's default of one group is not used then.
        given = expected.get("num_attention_heads")
    if name == "num_experts" and given in (0, [1]):
        # What others' versions call a dense model.
        given = None
    if name == "vocab_size" and type(given) is int:
        # Without what tokenizers add to it; a smaller one of the config would cut trained rows off.
        return given <= wanted
    if name == "position_embedding_type" and expected["multi_latent_attention"] and given in _ROTARY:
        # `rope_type` says it there.
        given = "rope"
    if name == "rope_type" and given == "yarn" and found.get("rotary_scaling_factor") == 1:
        given = "rope"
    if name == "openai_gelu" and given is False:
        # The fused activation is the same approximation (fusions/fused_bias_gelu.py).
        return True
    if name == "hybrid_override_pattern":
        given = found.get("hybrid_layer_pattern") if given is None else given
        # Bars stand between stages, and what predicts further tokens comes behind a slash.
        given = given.partition("/")[0].replace("|", "") if isinstance(given, str) else given
        return given == wanted or (given is None and _mixers_alone(wanted))
    if name == "softmax_scale":
        own = expected.get("kv_channels")
        given, wanted = (own**-0.5 if value is None and own else value for value in (given, wanted))
    if name == "window_size" and isinstance(given, (list, tuple)) and given[:1] in ([-1], (-1,)):
        given = None
    if name in ("moe_layer_freq", "window_attn_skip_freq"):
        given, wanted = (_by_layer(name, value, expected.get("num_layers")) for value in (given, wanted))
    if isinstance(wanted, (int, float)) and isinstance(given, (int, float)):
        return isinstance(given, bool) is isinstance(wanted, bool) and abs(given - wanted) <= 1e-6 * abs(wanted)
    if isinstance(wanted, (list, tuple)):
        # As a text it is a pattern in Python's own syntax, which is not run.
        return isinstance(given, str) or (isinstance(given, (list, tuple)) and list(given) == list(wanted))
    return type(given) is type(wanted) and bool(given == wanted)


def _mixers_alone(pattern: Any) -> bool:
    return isinstance(pattern, str) and set(pattern) == {"M"}


def _by_layer(name: str, value: Any, layers: Any) -> Any:
    """Spells a frequency out: which layers have experts, or a window (transformer/utils.py)."""
    if type(layers) is not int or type(value) not in (int, type(None)) or value == 0:
        return value
    if name == "moe_layer_freq":
        return [int(layer % value == 0) for layer in range(layers)]
    return [int(value is None or number % value != 0) for number in range(1, layers + 1)]

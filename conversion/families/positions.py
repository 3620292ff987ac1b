"""Megatron's arguments for rotary positions and sliding windows, and the settings they cannot express."""

from collections.abc import Mapping
from typing import Any

# Hard-coded in megatron-core 0.16.1 (models/common/embeddings/rotary_pos_embedding.py, `_apply_scaling`).
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_STORED = ("default", "linear", "llama3", "yarn")


def _rope(config: Any) -> Mapping[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    # Gemma 3 has one set per layer type.
    return dict(rope.get("full_attention", rope))


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or "default")


def rotary_arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of rotary positions and their scaling."""
    rope = _rope(config)
    kind = _kind(rope)
    arguments = {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    if kind == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = rope["factor"]
    elif kind == "llama3":
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    elif kind == "yarn":
        arguments |= {f"yarn_{name}": value for name, value in _yarn(config, rope).items()}
        arguments["yarn_correction_range_round_to_int"] = bool(rope.get("truncate", True))
    return arguments


def latent_rotary_arguments(config: Any) -> dict[str, Any]:
    """Returns the rotary arguments of multi-latent attention, whose names differ."""
    rope = _rope(config)
    arguments = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
    if _kind(rope) == "yarn":
        return {**arguments, "rope_type": "yarn", **_yarn(config, rope)}
    return {**arguments, "rope_type": "rope", "rotary_scaling_factor": 1.0}


def _yarn(config: Any, rope: Mapping[str, Any]) -> dict[str, Any]:
    # transformers applies mscale only if both are set; otherwise it scales by the factor alone.
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, mscale_all_dim = (float(scales[0]), float(scales[1])) if scales[0] and scales[1] else (1.0, 0.0)
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def unstored_positions(config: Any) -> str | None:
    """Returns what Megatron's arguments cannot express of a config's positions, `None` if they express everything."""
    rope = _rope(config)
    kind = _kind(rope)
    if kind not in _STORED:
        return f"rope_type {kind!r} has no argument in Megatron-LM, which would apply unscaled rotary positions"
    if kind == "llama3" and (other := [name for name, value in _LLAMA3.items() if rope.get(name, value) != value]):
        return f"Megatron-Core has fixed values of {', '.join(other)} for llama3 scaling; the config has different ones"
    if kind == "yarn" and rope.get("attention_factor") is not None:
        return "yarn's attention_factor has no argument in Megatron-LM"
    return None


def window_arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of sliding windows; unlike transformers', Megatron's excludes the current token."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    sliding = [kind == "sliding_attention" for kind in kinds] if kinds else [True]
    if not window or not any(sliding):
        return {}
    arguments: dict[str, Any] = {"window_size": (window - 1, 0)}
    if not all(sliding):
        arguments["window_attn_skip_freq"] = [int(slides) for slides in sliding]
    return arguments

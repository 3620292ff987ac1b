"""Megatron-LM's own arguments in a checkpoint against those that its config says."""

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from ...shown import shown

# What `None` stands for (megatron/training/arguments.py); of others it says nothing.
_DEFAULTS: Mapping[str, Any] = {"moe_router_topk_scaling_factor": 1.0, "rotary_percent": 1.0}
# Positions that turn, whatever rescales them.
_ROTARY = ("rope", "yarn")
_OF_ROTARY = ("rotary_base", "rotary_percent")
# Multi-latent attention has widths of its own.
_NOT_OF_LATENT = ("kv_channels", "num_query_groups", "group_query_attention")
_MOST_SHOWN = 8


def check_arguments(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Compares everything that both a checkpoint's arguments and a config say.

    Weights of another number of heads, or of another base of rotary positions, have the same shapes and train on in
    silence as another model.

    Args:
        found: of the checkpoint; values of Megatron's own types are passed over.
        expected: of the config, as `Family.arguments` has them.

    Raises:
        CheckpointError: naming each argument that differs and both values.
    """
    # Nothing is stored for positions that turn, and no number depends on how many there may be.
    turning = expected.get("position_embedding_type") in _ROTARY
    left_out = {"max_position_embeddings"} if turning else set(_OF_ROTARY)
    if expected.get("multi_latent_attention"):
        left_out |= set(_NOT_OF_LATENT)
    different = []
    for name, wanted in expected.items():
        given = found.get(name)
        if given is None and name in found:
            given = _DEFAULTS.get(name)
        if name in left_out or given is None or wanted is None:
            continue
        if not _alike(name, given, wanted, found, expected):
            different.append(f"{name} is {shown(given)}, and {shown(wanted)} by the config")
    if different:
        more = f" and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
        raise CheckpointError(
            f"{where}: its own arguments are not those of the config: {'; '.join(different[:_MOST_SHOWN])}{more}. "
            "Convert it with the config.json that it was trained with."
        )


def _alike(name: str, given: Any, wanted: Any, found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    if name == "num_query_groups" and found.get("group_query_attention") is False:
        # Megatron-LM's default of one group is not used then.
        given = expected.get("num_attention_heads")
    if name == "vocab_size" and type(given) is int:
        # Without what tokenizers add to it; a smaller one of the config would cut trained rows off.
        return given <= wanted
    if name == "position_embedding_type" and given in _ROTARY:
        given = "rope"
    if name == "moe_layer_freq" and type(given) is int and given > 0:
        given = [int(layer % given == 0) for layer in range(len(wanted))]
    if isinstance(wanted, (int, float)) and isinstance(given, (int, float)):
        return isinstance(given, bool) is isinstance(wanted, bool) and abs(given - wanted) <= 1e-6 * abs(wanted)
    if isinstance(wanted, (list, tuple)):
        # As a text it is a pattern in Python's own syntax, which is not run.
        return isinstance(given, str) or (isinstance(given, (list, tuple)) and list(given) == list(wanted))
    return type(given) is type(wanted) and bool(given == wanted)

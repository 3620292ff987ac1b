"""Fused kernels that compute the same on a shard of their input.

A kernel that reads each token, feature or head by itself is right on any shard of them. Kernels that read a full
weight, or values of other tokens, are not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from ..compat.fused_kernels import is_liger_head, liger_kernel_name
from ..compat.shard_safe import is_marked, origin

# Liger's function or class -> the setting of `apply_liger_kernel_to_*` that selects it.
_SHARD_SAFE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("LigerRMSNorm", *(f"LigerRMSNormFor{family}" for family in ("Gemma", "Gemma2", "Gemma3", "Olmo2"))),
            "rms_norm",
        ),
        **dict.fromkeys(("LigerSwiGLUMLP", "LigerPhi3SwiGLUMLP"), "swiglu"),
        "LigerGEGLUMLP": "geglu",
        "liger_rotary_pos_emb": "rope",
    }
)
# The same for kernels that need full tensors, or that were not compared with a single process.
_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("LigerExperts", "LigerBlockSparseTop2MLP"), "swiglu"),
        "LigerLayerNorm": "layer_norm",
        "LigerReLUSquared": "relu_squared",
        "liger_cross_entropy": "cross_entropy",
        **dict.fromkeys(
            ("liger_rotary_pos_emb_gpt_oss", "liger_rotary_pos_emb_vision", "liger_multimodal_rotary_pos_emb"), "rope"
        ),
        **dict.fromkeys(("LigerRMSNormForGemma4", "LigerRMSNormForMuseGlimmer"), "rms_norm"),
        "LigerGEGLUMLPForGemma4": "geglu",
    }
)
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
# Layers in the mappings of `kernels` that read each token, feature or head by itself.
SHARD_SAFE_LAYERS = frozenset(
    ("RMSNorm", "SwiGLUMLP", "GeGLUMLP", "rotary_pos_emb")
    + ("SiLU", "GeLU", "GeluTanh", "NewGELU", "FastGELU", "QuickGELU")
)


def is_shard_safe(function: Any) -> bool:
    """Returns whether a function is marked as shard-safe, or is a fused kernel that is right on shards.

    Liger's forwards of models count as such: they are called in a way that leaves the loss to the model's own head.
    """
    return is_marked(function) or liger_kernel_name(function) in _SHARD_SAFE or is_liger_head(function)


def is_fused_class(cls: type) -> bool:
    """Returns whether a module class is a fused kernel that is right on shards."""
    return isinstance(cls, type) and liger_kernel_name(cls) in _SHARD_SAFE


def has_parallel_forward(module: nn.Module) -> bool:
    """Returns whether the forward of a module's class is this library's, which another forward would bypass."""
    return origin(type(module).forward) == __name__.partition(".")[0]


def liger_setting(function: Any) -> str | None:
    """Returns the setting of Liger's patches that selects a function or class; `None` if it is unknown."""
    name = liger_kernel_name(function)
    return None if name is None else _SHARD_SAFE.get(name, _OTHERS.get(name))


@dataclass(frozen=True)
class LigerChoice:
    """Liger's settings for a parallelized model.

    Attributes:
        settings: arguments of Liger's patches.
        losses: settings of kernels whose work the model's own head and loss do.
        skipped: settings that are on by default but not supported.
        rejected: the same, asked for by name.
    """

    settings: Mapping[str, bool]
    losses: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()


def choose_liger_kernels(defaults: Mapping[str, bool], requested: Mapping[str, bool]) -> LigerChoice:
    """Returns Liger's settings for a parallelized model.

    Args:
        defaults: the settings that Liger knows for the model's type.
        requested: those that the user passed; Liger ignores others.
    """
    known = {name: bool(value) for name, value in requested.items() if name in defaults}
    active = [name for name, value in {**defaults, **known}.items() if value]
    supported = {*_SHARD_SAFE.values()}
    others = [name for name in active if name not in supported and name not in _LOSSES]
    return LigerChoice(
        {name: name in active and name in supported for name in defaults},
        tuple(name for name in active if name in _LOSSES),
        tuple(name for name in others if name not in known),
        tuple(name for name in others if name in known),
    )

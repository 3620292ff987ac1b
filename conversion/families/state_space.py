"""Mamba2 state space mixers in Megatron-Core (`ssm/mamba_mixer.py` of 0.16.1), and the settings they do not support."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..megatron.rules import Rule
from .family import Arguments, renamed

# Fixed in Megatron's mixer regardless of the config.
_KERNEL, _EPSILON = 4, 1e-5


@dataclass(frozen=True)
class StateSpace:
    """Sizes of a mixer: heads and their dimension, groups of heads that share a state, and the state's dimension."""

    heads: int
    head_dim: int
    groups: int
    state: int

    def arguments(self) -> Arguments:
        """Returns Megatron-LM's arguments; models with mixers have no position embeddings."""
        return {
            "mamba_num_heads": self.heads,
            "mamba_head_dim": self.head_dim,
            "mamba_num_groups": self.groups,
            "mamba_state_dim": self.state,
            "position_embedding_type": "none",
        }

    def sizes(self) -> Mapping[str, int]:
        """Returns the dimensions split over tensor-parallel ranks."""
        return {"mamba_num_heads": self.heads, "mamba_num_groups": self.groups}

    def blocks(self) -> Mapping[str, Mapping[str, int]]:
        """Returns the row blocks that ranks split separately; transformers has them in the same order."""
        width, states = self.heads * self.head_dim, self.groups * self.state
        convolved = {"x": width, "B": states, "C": states}
        return {
            "mixer.in_proj.weight": {"z": width, **convolved, "dt": self.heads},
            "mixer.conv1d.weight": convolved,
            "mixer.conv1d.bias": convolved,
        }


def mixer(source: str, target: str) -> Iterator[Rule]:
    """Yields the rules of a mixer without the norm before it."""
    for name in ("A_log", "D", "dt_bias"):
        yield Rule((f"{source}.{name}",), (f"{target}.{name}",))
    yield from renamed(f"{source}.in_proj", f"{target}.in_proj")
    yield from renamed(f"{source}.conv1d", f"{target}.conv1d", bias=True)
    yield from renamed(f"{source}.norm", f"{target}.norm")
    yield from renamed(f"{source}.out_proj", f"{target}.out_proj")


def unsupported_mixer_reason(config: Any, activation: str) -> str | None:
    """Returns the setting that Megatron's mixer does not support, `None` if it supports all."""
    expected: dict[str, Any] = {"use_bias": False, "use_conv_bias": True, "conv_kernel": _KERNEL}
    expected |= {"layer_norm_epsilon": _EPSILON, activation: "silu"}
    other = next((name for name, value in expected.items() if getattr(config, name) != value), None)
    if other is None:
        return None
    return f"{other}={getattr(config, other)}: Megatron-Core's MambaMixer has {expected[other]}"


def limited_steps(smallest: float, largest: float) -> Iterator[str]:
    """Yields a note if transformers clamps a mixer's time steps."""
    if (smallest, largest) != (0.0, float("inf")):
        yield (
            f"time steps limited to {smallest:g} and {largest:g}: transformers clamps them, Megatron-Core's MambaMixer "
            "does not"
        )

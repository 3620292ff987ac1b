"""Cost of a layer in multiply-adds per token, estimated from the shapes of its weights."""

from collections.abc import Iterable
from typing import Any

from torch import nn

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")


def estimate_cost(module: nn.Module, config: Any = None) -> float:
    """Estimates a module's multiply-adds for one token from its weights' shapes, without the attention scores.

    Only the experts that a token is routed to count, and embeddings cost nothing. Parameters may be on the meta device.

    Args:
        module (`nn.Module`): a layer, or an output head.
        config (`PretrainedConfig`, *optional*): provides the number of experts and of experts per token; without it
            every weight counts.
    """
    experts, active = _first_number(config, EXPERTS), _first_number(config, EXPERTS_PER_TOKEN)
    share = active / experts if experts and active else 1.0
    module_lists = ((name, child) for name, child in module.named_modules() if isinstance(child, nn.ModuleList))
    lists = tuple(f"{name}." for name, child in module_lists if len(child) == experts)
    total = 0.0
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        # Expert biases are `[experts, features]`, so the name decides.
        if parameter.dim() < 2 or name.endswith("bias") or isinstance(owner, nn.Embedding):
            continue
        routed = (parameter.dim() == 3 and parameter.shape[0] == experts) or name.startswith(lists)
        total += parameter.numel() * (share if routed else 1.0)
    return total


def estimate_costs(layers: Iterable[nn.Module], config: Any = None) -> tuple[float, ...]:
    """Returns `estimate_cost` of each layer."""
    return tuple(estimate_cost(layer, config) for layer in layers)


def _first_number(config: Any, names: tuple[str, ...]) -> int | None:
    """Returns the first of several alternative attributes that is a positive integer, or `None`."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)

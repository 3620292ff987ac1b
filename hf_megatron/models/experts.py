"""Lookup of the modules that hold the experts of MoE layers."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..compat.transformers_models import counted_experts
from .spec import ModelSpec, lookup

_HIDDEN_STATES = "hidden_states"


def find_experts(model: Any, spec: ModelSpec) -> dict[str, int]:
    """Returns the names of the modules that hold experts, mapped to their number of experts.

    The experts lie along dim 0 of each weight. These modules are instances of classes that transformers decorates with
    `use_experts_implementation`, and modules that the spec lists.
    """
    expert_counts = {}
    for name, module in model.named_modules():
        attribute = lookup(name, spec.moe.experts)
        count = counted_experts(module) if attribute is None else getattr(module, attribute)
        if count is not None and next(module.parameters(), None) is not None:
            expert_counts[name] = count
    return expert_counts


def find_identity_experts(model: Any, spec: ModelSpec, experts: Iterable[str]) -> dict[str, int]:
    """Maps modules that hold experts to their number of identity experts, which return tokens unchanged."""
    attributes = {
        name: attribute for name in experts if (attribute := lookup(name, spec.moe.identity_experts)) is not None
    }
    return {name: getattr(model.get_submodule(name), attribute) for name, attribute in attributes.items()}


def pointwise_moe_blocks(model: Any, experts: Iterable[str]) -> dict[str, list[str]]:
    """Maps MoE blocks to their children if every block's forward takes only `hidden_states`; else returns `{}`."""
    blocks = {name.rpartition(".")[0] for name in experts}
    forwards = [type(model.get_submodule(block)).forward for block in blocks]
    if any(list(inspect.signature(forward).parameters) != ["self", _HIDDEN_STATES] for forward in forwards):
        return {}
    return {block: [f"{block}.{child}" for child, _ in model.get_submodule(block).named_children()] for block in blocks}


def names_inside(model: nn.Module, modules: Mapping[str, Any]) -> dict[str, str]:
    """Maps the names of all parameters inside the given modules to the name of that module."""
    return {
        f"{name}.{parameter}": name
        for name in modules
        for parameter, _ in model.get_submodule(name).named_parameters(remove_duplicate=False)
    }

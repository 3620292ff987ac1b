"""Optimizers that step several others, such as Muon for matrices and AdamW for the rest: Trainer takes one object."""

from collections.abc import Sequence
from typing import Any

import torch

# Attribute of a combined optimizer: its prepared parts.
COMBINED = "_hf_megatron_combined"


def find_parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that an optimizer holds and that share out its parameters; empty if it has none.

    A wrapper of a single optimizer (SAM, Lookahead) may edit parameters itself, and has no parts.
    """
    held: list[Any] = []
    for value in (value for name, value in vars(optimizer).items() if name != COMBINED):
        held.extend(
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        )
    parts = list({id(value): value for value in held if isinstance(value, torch.optim.Optimizer)}.values())
    covered = [key for part in parts for key in _parameters(part)]
    shares_out = len(parts) > 1 and len(covered) == len(set(covered)) and set(covered) == set(_parameters(optimizer))
    return parts if shares_out else []


def list_stepping(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that step on parameters: the parts of combined ones, and all others."""
    listed: list[torch.optim.Optimizer] = []
    for optimizer in optimizers:
        parts = find_parts(optimizer)
        listed.extend(list_stepping(parts) if parts else [optimizer])
    return listed


def _parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]

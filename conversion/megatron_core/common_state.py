"""Non-tensor state of `torch_dist` checkpoints: arguments, iteration, and an optimizer's parameter groups.

File names in the docstrings are relative to `megatron/core` of megatron-core 0.16.1.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..interfaces import ADAMW, OptimizerState
from ..megatron.arguments import stored_arguments
from ..megatron.folder import RELEASE

# Parameter group settings of torch's, Apex's and TransformerEngine's Adam, and the keys by which Megatron identifies a
# group (optimizer/optimizer.py, `param_group_identifier_keys`).
_GROUP: Mapping[str, Any] = MappingProxyType(
    {
        **ADAMW,
        "lr": 0.0,
        "bias_correction": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
    }
)
# More steps than any run takes.
_MOST_STEPS = 1 << 62
_LIMITS = ("max_lr", "min_lr")


def get_arguments(common: Mapping[Any, Any], where: object) -> dict[str, Any]:
    """Returns Megatron-LM's `args` without values of Megatron's types; raises the errors of `stored_arguments`."""
    arguments = stored_arguments(common, where)
    return {name: value for name, value in arguments.items() if isinstance(name, str) and is_plain_value(value)}


def is_plain_value(value: Any) -> bool:
    """Returns whether a value needs no class of Megatron."""
    if isinstance(value, (list, tuple)):
        return len(value) < 10_000 and all(isinstance(item, (str, int, float, type(None))) for item in value)
    return isinstance(value, (str, int, float, type(None), torch.dtype))


def get_iteration(common: Mapping[Any, Any], path: Path) -> int | None:
    """Returns the checkpoint's iteration, from the state or the folder's name."""
    iteration = common.get("iteration")
    if type(iteration) is int and iteration >= 0 and path.name != RELEASE:
        return iteration
    match = re.fullmatch(r"iter_(\d+)", path.name)
    return int(match[1]) if match else None


def list_optimizer_states(common: Mapping[Any, Any]) -> Sequence[Mapping[Any, Any]]:
    """Returns the state of one optimizer, or of several that are keyed by index (optimizer/optimizer.py)."""
    optimizer = common.get("optimizer")
    if not isinstance(optimizer, dict):
        return []
    several = [value for key, value in optimizer.items() if type(key) is int and isinstance(value, dict)]
    return several or [optimizer]


def get_optimizer_state(common: Mapping[Any, Any]) -> OptimizerState | None:
    """Returns settings and the number of steps, stored per group or globally (dist_checkpointing/optimizer.py)."""
    groups: list[Mapping[str, Any]] = []
    steps: list[int] = []
    for state in list_optimizer_states(common):
        inner = state.get("optimizer")
        if not isinstance(inner, dict):
            continue
        shared = inner.get("state")
        param_groups: Iterable[Any] = inner.get("param_groups") or ()
        steps += _steps([shared.get("common_step")] if isinstance(shared, dict) else [])
        for group in param_groups:
            if isinstance(group, dict):
                steps += _steps([group.get("step")])
                groups.append(
                    {
                        name: group[name]
                        for name in group
                        if name not in ("params", "step") and is_plain_value(group[name])
                    }
                )
    return OptimizerState(max(steps), tuple(groups)) if steps else None


def _steps(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values if isinstance(value, (int, float)) and 0 <= value < _MOST_STEPS]


def optimizer_state(optimizer: OptimizerState, experts_apart: bool) -> dict[Any, Any]:
    """Returns the non-tensor state of a distributed optimizer (optimizer/distrib_optimizer.py).

    Args:
        experts_apart: whether experts have a separate optimizer, as Megatron gives them if ep > 1.
    """

    def state(experts: bool) -> dict[str, Any]:
        groups = parameter_groups(optimizer, experts)
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    return {0: state(False), 1: state(True)} if experts_apart else state(False)


def parameter_groups(optimizer: OptimizerState, experts: bool = False) -> list[dict[str, Any]]:
    """Returns two groups: one with weight decay and one without, for norms and biases.

    Groups that came from Megatron keep their settings; otherwise both groups use the settings of the decayed one.
    """
    known = optimizer.hyperparameters
    decayed = next((group for group in known if group.get("weight_decay")), next(iter(known), {}))
    decay = float(decayed.get("weight_decay", _GROUP["weight_decay"]))
    groups = []
    for factor in (1.0, 0.0):
        matching_group = next((group for group in known if group.get("wd_mult") == factor), None)
        settings = {**decayed, "weight_decay": decay * factor} if matching_group is None else matching_group
        group = {**_GROUP, **{name: settings[name] for name in settings if name in _GROUP or name in _LIMITS}}
        group |= {"wd_mult": factor, "is_expert_parallel": experts, "step": float(optimizer.step)}
        groups.append({"max_lr": group["lr"], "min_lr": 0.0, **group})
    return groups


def rate_schedule(optimizer: OptimizerState, samples: int) -> dict[str, Any]:
    """Returns the state of Megatron-LM's rate schedule after this many samples (optimizer_param_scheduler.py)."""
    decayed = parameter_groups(optimizer)[0]
    return {
        "max_lr": decayed["max_lr"],
        "lr_warmup_steps": 0,
        "num_steps": samples,
        "lr_decay_style": "constant",
        "lr_decay_steps": 1,
        "min_lr": decayed["min_lr"] or 0.0,
        "start_wd": decayed["weight_decay"],
        "end_wd": decayed["weight_decay"],
        "wd_incr_style": "constant",
        "wd_incr_steps": 1,
    }

"""Megatron's parallelism for stock Hugging Face models: an import and one argument.

    import hf_megatron
    from hf_megatron import MegatronConfig

    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(tp_size=2))

Importing the package replaces the few functions through which a model is parallelized (`ENTRY_POINTS` in
`hf_megatron.integrations.patch_table`). The other patches of that table are applied when the first model is
parallelized or a layout is launched.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .compat.patch_registry import PATCH_REGISTRY
from .compat.versions import __version__
from .config import MegatronConfig
from .errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegatronError,
    NonFiniteGradientError,
    PlanError,
    RankError,
    ReplicaError,
    UnsupportedError,
    UnverifiedLayoutError,
)
from .integrations.accelerate.environment import config_from_environment, give_back_launch, take_over_launch
from .integrations.accelerate.plugin import MegatronPlugin
from .integrations.patch_table import HOOKS, PATCHES, PATTERNS
from .models.spec import ModelSpec

if TYPE_CHECKING:
    from .compat.shard_safe import shard_safe
    from .core.memory.recompute import apply_recompute
    from .core.off_stage import local_named_parameters
    from .data_parallel.distributed_optimizer import prepare_optimizer
    from .expert_parallel.expert_load import ExpertLoad, expert_load
    from .expert_parallel.router_replay import Routing, record_routing, replay_routing
    from .integrations.hub.pull import pull_checkpoint
    from .integrations.hub.push import push_checkpoint
    from .integrations.trainer.callbacks.expert_load import ExpertLoadCallback
    from .integrations.trainer.termination import TerminationSignal
    from .integrations.transformers.unsharded import load_unsharded
    from .models.registry import register_model
    from .parallel_state import data_parallel_group, get_parallel_state
    from .parallelize import ParallelPlan, parallel_plan
    from .tensor_parallel.token_divergence import token_kl_divergences
    from .tensor_parallel.token_log_probs import TokenStatistics, token_log_probs, token_statistics

# Modules whose names are public; everything else may change without notice.
PUBLIC_MODULES = (
    "hf_megatron",
    "hf_megatron.callbacks",
    "hf_megatron.conversion",
    "hf_megatron.datasets",
    "hf_megatron.diagnostics",
    "hf_megatron.model_cards",
    "hf_megatron.planner",
    "hf_megatron.schedules",
    "hf_megatron.testing",
)
# Names whose modules import torch, loaded on first access.
_LAZY = {
    "apply_recompute": "core.memory.recompute",
    "ExpertLoad": "expert_parallel.expert_load",
    "ExpertLoadCallback": "integrations.trainer.callbacks.expert_load",
    "ParallelPlan": "parallelize",
    "Routing": "expert_parallel.router_replay",
    "expert_load": "expert_parallel.expert_load",
    "data_parallel_group": "parallel_state",
    "get_parallel_state": "parallel_state",
    "load_unsharded": "integrations.transformers.unsharded",
    "local_named_parameters": "core.off_stage",
    "parallel_plan": "parallelize",
    "pull_checkpoint": "integrations.hub.pull",
    "push_checkpoint": "integrations.hub.push",
    "record_routing": "expert_parallel.router_replay",
    "replay_routing": "expert_parallel.router_replay",
    "TerminationSignal": "integrations.trainer.termination",
    "prepare_optimizer": "data_parallel.distributed_optimizer",
    "register_model": "models.registry",
    "token_kl_divergences": "tensor_parallel.token_divergence",
    "TokenStatistics": "tensor_parallel.token_log_probs",
    "token_log_probs": "tensor_parallel.token_log_probs",
    "token_statistics": "tensor_parallel.token_log_probs",
    "shard_safe": "compat.shard_safe",
}


def enable() -> None:
    """Applies the entry points, and the other patches if they were applied before; idempotent.

    Called on import.
    """
    for patch in PATCHES:
        PATCH_REGISTRY.declare(patch)
    for pattern in PATTERNS:
        PATCH_REGISTRY.declare_pattern(pattern)
    for module_name, make in HOOKS:
        PATCH_REGISTRY.declare_hook(module_name, make)
    take_over_launch()
    PATCH_REGISTRY.enable()


def disable() -> None:
    """Restores the original upstream function objects and removes every registration.

    Parallelized models cannot be called until `enable()`.
    """
    PATCH_REGISTRY.disable()
    give_back_launch()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


enable()

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExpertLoad",
    "ExpertLoadCallback",
    "MegatronConfig",
    "MegatronError",
    "MegatronPlugin",
    "ModelSpec",
    "NonFiniteGradientError",
    "PUBLIC_MODULES",
    "ParallelPlan",
    "PlanError",
    "RankError",
    "ReplicaError",
    "Routing",
    "TerminationSignal",
    "UnsupportedError",
    "UnverifiedLayoutError",
    "__version__",
    "apply_recompute",
    "config_from_environment",
    "data_parallel_group",
    "disable",
    "enable",
    "expert_load",
    "get_parallel_state",
    "load_unsharded",
    "local_named_parameters",
    "parallel_plan",
    "prepare_optimizer",
    "pull_checkpoint",
    "push_checkpoint",
    "record_routing",
    "register_model",
    "replay_routing",
    "token_kl_divergences",
    "TokenStatistics",
    "token_log_probs",
    "token_statistics",
    "shard_safe",
]

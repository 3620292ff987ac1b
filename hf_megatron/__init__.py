"""Megatron's parallelism for stock Hugging Face models: an import and one argument.

    import hf_megatron
    from hf_megatron import MegatronConfig

    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(tp_size=2))

Importing the package declares its patches (see `hf_megatron.integrations.patches`); each is applied when its module is
imported, and all pass through what was loaded without `megatron_config`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .config import MegatronConfig
from .errors import (
    CheckpointError,
    ConfigError,
    MegatronError,
    NonFiniteGradientError,
    PlanError,
    RankError,
    UnsupportedError,
    UnverifiedLayoutError,
)
from .integrations.accelerate import (
    MegatronPlugin,
    config_from_environment,
    give_back_launch,
    take_over_launch,
)
from .integrations.patches import HOOKS, PATCHES
from .patch_ledger import LEDGER
from .spec import ModelSpec
from .version import __version__

if TYPE_CHECKING:
    from .absent_weights import own_parameters
    from .data_parallel.optimizer import prepare_optimizer
    from .divergence import token_divergences
    from .expert_parallel.load import ExpertLoad, expert_load
    from .hub.pull import pull
    from .hub.push import push_checkpoint
    from .integrations.termination import TerminationSignal
    from .integrations.trainer_experts import ExpertLoadCallback
    from .log_probs import TokenStatistics, token_log_probs, token_statistics
    from .parallelize import ParallelPlan, parallel_plan
    from .parts import works_on_parts
    from .registry import register_model
    from .router_replay import Routing, record_routing, replay_routing

# Names whose modules import torch: loaded when first asked for.
_LAZY = {
    "ExpertLoad": "expert_parallel.load",
    "ExpertLoadCallback": "integrations.trainer_experts",
    "ParallelPlan": "parallelize",
    "Routing": "router_replay",
    "expert_load": "expert_parallel.load",
    "own_parameters": "absent_weights",
    "parallel_plan": "parallelize",
    "pull": "hub.pull",
    "push_checkpoint": "hub.push",
    "record_routing": "router_replay",
    "replay_routing": "router_replay",
    "TerminationSignal": "integrations.termination",
    "prepare_optimizer": "data_parallel.optimizer",
    "register_model": "registry",
    "token_divergences": "divergence",
    "TokenStatistics": "log_probs",
    "token_log_probs": "log_probs",
    "token_statistics": "log_probs",
    "works_on_parts": "parts",
}


def enable() -> None:
    """Applies the patches, now or when their modules are imported; twice is once. Called by the import."""
    for patch in PATCHES:
        if LEDGER.patches.get(patch.target) is not patch:
            LEDGER.declare(patch)
    for module_name, make in HOOKS:
        LEDGER.declare_hook(module_name, make)
    take_over_launch()
    LEDGER.enable()


def disable() -> None:
    """Restores the identical upstream function objects and everything else that was replaced or registered.

    Laid out models cannot be called until `enable()`.
    """
    LEDGER.disable()
    give_back_launch()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


enable()

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ExpertLoad",
    "ExpertLoadCallback",
    "MegatronConfig",
    "MegatronError",
    "MegatronPlugin",
    "ModelSpec",
    "NonFiniteGradientError",
    "ParallelPlan",
    "PlanError",
    "RankError",
    "Routing",
    "TerminationSignal",
    "UnsupportedError",
    "UnverifiedLayoutError",
    "__version__",
    "config_from_environment",
    "disable",
    "enable",
    "expert_load",
    "own_parameters",
    "parallel_plan",
    "prepare_optimizer",
    "pull",
    "push_checkpoint",
    "record_routing",
    "register_model",
    "replay_routing",
    "token_divergences",
    "TokenStatistics",
    "token_log_probs",
    "token_statistics",
    "works_on_parts",
]

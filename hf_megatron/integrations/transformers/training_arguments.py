"""TrainingArguments on CPU jobs, and for models that TRL loads with a `megatron_config`.

This module is imported while transformers itself is being imported, so it must not import transformers.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...compat.patch_registry import PATCH_REGISTRY
from ...core.runtime import RUNTIME
from ..accelerate.environment import job_world_size


def post_init(original: Callable, self: Any) -> None:
    """Sets `use_cpu` on ranks without accelerators, where upstream would report a single process per rank."""
    # TRL's trainers may load the model in their `__init__`, which must be patched by then. TRL's scripts set
    # `model_init_kwargs` only after the arguments exist, so a multi-rank job may still get a layout.
    if "model_init_kwargs" in vars(self) and (
        job_world_size() > 1 or "megatron_config" in (self.model_init_kwargs or ())
    ):
        PATCH_REGISTRY.activate()
    if (RUNTIME.models or RUNTIME.launch is not None) and not torch.accelerator.is_available():
        self.use_cpu = True
    original(self)

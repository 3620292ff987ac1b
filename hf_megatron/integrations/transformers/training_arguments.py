"""TrainingArguments of CPU jobs, and of models that TRL loads with a layout.

Imported while transformers itself is being imported, so it imports none of it.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...compat.patch_registry import PATCH_REGISTRY
from ...core.runtime import RUNTIME
from ..accelerate.environment import job_world_size


def post_init(original: Callable, self: Any) -> None:
    """Sets `use_cpu` on ranks without accelerators; stock reports one process on each of them."""
    # TRL's trainers may load the model in their `__init__`, which has to be replaced by then. Its scripts set
    # `model_init_kwargs` after the arguments were made, so in a job of several ranks they may yet have a layout.
    if "model_init_kwargs" in vars(self) and (
        job_world_size() > 1 or "megatron_config" in (self.model_init_kwargs or ())
    ):
        PATCH_REGISTRY.activate()
    if (RUNTIME.models or RUNTIME.launch is not None) and not torch.accelerator.is_available():
        self.use_cpu = True
    original(self)

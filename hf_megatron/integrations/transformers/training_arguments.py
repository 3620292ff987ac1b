"""TrainingArguments of a job whose ranks are CPUs; imported while transformers itself is, so it imports none of it."""

from collections.abc import Callable
from typing import Any

import torch

from ...core.runtime import RUNTIME


def post_init(original: Callable, self: Any) -> None:
    """Takes the ranks of a job without accelerators for CPUs; stock reports one process on each of them."""
    if (RUNTIME.models or RUNTIME.launch is not None) and not torch.accelerator.is_available():
        self.use_cpu = True
    original(self)

"""TrainingArguments of a job whose ranks are CPUs; imported while transformers itself is, so it imports none of it."""

from collections.abc import Callable
from typing import Any

import torch

from ...compat.patch_registry import LEDGER


def post_init(original: Callable, self: Any) -> None:
    """Takes the ranks of a job without accelerators for CPUs; stock reports one process on each of them."""
    if (LEDGER.models or LEDGER.launch is not None) and not torch.accelerator.is_available():
        self.use_cpu = True
    original(self)

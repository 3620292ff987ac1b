"""transformers.Trainer: the few places where a stock Trainer has to know which ranks share a batch."""

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from ..parallelize import parallel_state
from .accelerate import parallelism_config


def init(original: Callable) -> Callable:
    """Refuses, before anything is built, arguments that would train differently from one process."""

    @functools.wraps(original)
    def wrapper(self: Any, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if model is not None and args is not None and parallel_state(model) is not None:
            for name in ("deepspeed", "fsdp"):
                if getattr(args, name, None):
                    raise UnsupportedError(f"TrainingArguments.{name} beside megatron_config: drop it.")
        original(self, model, args, *rest, **kwargs)

    return wrapper


def build_accelerator_args(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, **kwargs: Any) -> dict[str, Any]:
        arguments = original(self, **kwargs)
        state = None if self.model is None else parallel_state(self.model)
        if state is not None:
            arguments["parallelism_config"] = parallelism_config(state.config.ranks_per_replica)
        return arguments

    return wrapper

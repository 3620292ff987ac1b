"""What would train silently wrong on a split model today, refused by name before it starts."""

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError


def _refusing(original: Callable, message: str) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        # Read directly: this file is loaded with torch, long before the rest of the library is needed.
        given = kwargs.get("module") if model is None else model
        if not isinstance(given, str) and getattr(given, "_hf_megatron", None) is not None:
            raise UnsupportedError(f"{type(self).__name__}: {message}")
        original(self, *([] if model is None else [model]), *args, **kwargs)

    return wrapper


def data_parallel(original: Callable) -> Callable:
    """Whole-model DDP would average shards that belong to different parts of the weights."""
    return _refusing(
        original,
        "a model laid out by hf_megatron reduces its own gradients and cannot be wrapped. Pass it to Trainer or "
        "Accelerator.prepare as it is.",
    )


def peft(original: Callable) -> Callable:
    """Adapters have to be split like the layers they wrap."""
    return _refusing(
        original,
        "PEFT adapters on a model laid out by hf_megatron are not supported yet. Train the whole model, or train the "
        "adapter on a model loaded without megatron_config.",
    )


def trl(original: Callable) -> Callable:
    """TRL's fused head would read one rank's vocabulary as the whole."""
    return _refusing(
        original,
        "TRL's trainers on a model laid out by hf_megatron are not supported yet. Use transformers.Trainer or an "
        "Accelerate loop.",
    )

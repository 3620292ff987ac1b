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


_TRL = (
    "of TRL's trainers SFTTrainer and DPOTrainer train a model laid out by hf_megatron. Use one of them, "
    "transformers.Trainer or an Accelerate loop."
)
_TRL_TRAINERS = ("trl.trainer.sft_trainer.SFTTrainer", "trl.trainer.dpo_trainer.DPOTrainer")


def trl(original: Callable) -> Callable:
    """Others compute their losses in ways nobody has compared with one process."""
    return _refusing(original, _TRL)


def refuse_other_trl_trainers(trainer: Any) -> None:
    """Raises for a trainer whose nearest class of TRL's is none of those that were compared with one process."""
    nearest = next((cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")), None)
    if nearest is not None and f"{nearest.__module__}.{nearest.__qualname__}" not in _TRL_TRAINERS:
        raise UnsupportedError(f"{type(trainer).__name__}: {_TRL}")

"""Wrappers and trainers that would silently train a parallelized model wrong, rejected by name before they start."""

from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedError


def _rejecting(message: str) -> Callable:
    """Returns the replacement of an `__init__` whose first argument is a model or module."""

    def reject(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        """Rejects a parallelized model, or a module that contains one, by name."""
        from torch import nn

        model = args[0] if args else kwargs.get("model", kwargs.get("module"))
        # Read the attribute directly: this module is loaded with torch, long before the rest of the library is needed.
        if isinstance(model, nn.Module) and any("_hf_megatron" in vars(module) for module in model.modules()):
            raise UnsupportedError(f"{type(self).__name__}: {message}")
        original(self, *args, **kwargs)

    return reject


_TRL_TRAINERS = (
    *(
        f"trl.trainer.{name.lower()}_trainer.{name}Trainer"
        for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation")
    ),
    *(f"trl.experimental.{name.lower()}.{name.lower()}_trainer.{name}Trainer" for name in ("ORPO", "CPO", "GKD")),
    # Earlier import paths of the same trainers.
    *(f"trl.experimental.{name.lower()}.{name}Trainer" for name in ("KTO", "Distillation")),
)
_NAMES = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in _TRL_TRAINERS))
_TRL = (
    f"a parallelized model can only be trained with these TRL trainers: {_NAMES}. Use one of them, "
    "transformers.Trainer or an Accelerate loop."
)

# DDP around the model would average shards of different weights.
data_parallel = _rejecting(
    "a parallelized model reduces its own gradients and cannot be wrapped. Pass it unwrapped to Trainer or "
    "Accelerator.prepare."
)


def reject_other_trl_trainers(trainer: Any) -> None:
    """Raises for a trainer whose nearest TRL base class has no recorded parity result."""
    nearest = next((cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")), None)
    if nearest is not None and f"{nearest.__module__}.{nearest.__qualname__}" not in _TRL_TRAINERS:
        raise UnsupportedError(f"{type(trainer).__name__}: {_TRL}")

"""Keys and values of a training forward are kept only where the call asks for them.

Configs ask for a cache by default, which training never reads. With a cache transformers also takes packed documents,
told by their positions, for one: the loss of a plain loop then depends on a flag that is about generation.
"""

import inspect
from typing import Any

import torch

_CACHES = ("past_key_values", "cache_params")


def leave_out_in_training(model: Any) -> None:
    """Makes forwards of a model in training behave as with `use_cache=False`, unless the call says otherwise."""
    parameters = inspect.signature(type(model).forward).parameters
    if "use_cache" in parameters:
        place = list(parameters).index("use_cache") - 1
        model.register_forward_pre_hook(_Hook(place), with_kwargs=True)


class _Hook:
    """Adds the argument; `place` is its position behind `self`."""

    def __init__(self, place: int):
        self.place = place

    def __call__(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        is_asked = "use_cache" in kwargs or len(args) > self.place or any(kwargs.get(n) is not None for n in _CACHES)
        if is_asked or not model.training or not torch.is_grad_enabled():
            return None
        return args, {**kwargs, "use_cache": False}

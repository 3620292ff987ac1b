"""Keys and values of a training forward are kept only where the call asks for them.

Configs ask for a cache by default, which training never reads. With a cache transformers also takes packed documents,
told by their positions, for one: the loss of a plain loop then depends on a flag that is about generation.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

_CACHES = ("past_key_values", "cache_params")


def leave_out_in_training(model: Any) -> None:
    """Makes forwards of a model in training behave as with `use_cache=False`, unless the call says otherwise.

    They raise `UnsupportedError` where that would tell documents apart which one process takes for one.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    if "use_cache" in names:
        model.register_forward_pre_hook(_Hook(names), with_kwargs=True)


class _Hook:
    """Adds the argument; `names` are those of the call's arguments, in order."""

    def __init__(self, names: list[str]):
        self.names = names

    def __call__(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        is_asked = "use_cache" in given or any(given.get(name) is not None for name in _CACHES)
        if is_asked or not model.training or not torch.is_grad_enabled():
            return None
        if getattr(model.config.get_text_config(), "use_cache", False):
            _refuse_documents(model, given)
        return args, {**kwargs, "use_cache": False}


def _refuse_documents(model: Any, arguments: Mapping[str, Any]) -> None:
    # With a mask, transformers looks at no positions.
    positions = arguments.get("position_ids")
    if arguments.get("attention_mask") is not None or not isinstance(positions, Tensor) or positions.dim() != 2:
        return
    if positions.shape[1] > 1 and not bool((positions.diff(dim=1) == 1).all()):
        raise UnsupportedError(
            "position_ids of several documents in a row, while config.use_cache = True: one process makes a cache, and "
            f"takes such a row for one document. Call {type(model).__name__} with use_cache=False, or set "
            "model.config.use_cache = False, and documents are told apart, there and here."
        )

"""PEFT: refused until adapters are laid out like the layers they wrap; today they train silently wrong."""

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from ..parallelize import parallel_state


def init(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if parallel_state(model) is not None:
            raise UnsupportedError(
                "PEFT adapters on a model laid out by hf_megatron: not supported yet. Train the whole model, or train "
                "the adapter on a model loaded without megatron_config."
            )
        original(self, model, *args, **kwargs)

    return wrapper

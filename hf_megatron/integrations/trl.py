"""TRL: refused until its fused head is replaced; it would read one rank's vocabulary as the whole."""

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError
from ..parallelize import parallel_state


def init(original: Callable) -> Callable:
    @functools.wraps(original)
    def wrapper(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        if model is not None and not isinstance(model, str) and parallel_state(model) is not None:
            raise UnsupportedError(
                f"{type(self).__name__} on a model laid out by hf_megatron: TRL's trainers are not supported yet. Use "
                "transformers.Trainer or an Accelerate loop."
            )
        original(self, model, *args, **kwargs)

    return wrapper

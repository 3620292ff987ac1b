"""Trainer's steps that have fewer calls than `gradient_accumulation_steps`, while batches grow.

Stock counts calls to know where a step ends, and takes as many for each. Those that a step does not have come first
and do nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from ...errors import DataError
from .sample_counter import SamplesCallback

# What a loss does with the number of its targets; others look at a tensor, or move it.
_ARITHMETIC = frozenset(
    ("div", "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__itruediv__", "reciprocal")
    + ("mul", "mul_", "multiply", "__mul__", "__rmul__", "item", "tolist", "__float__", "__int__")
)


class NoCall(dict):
    """Inputs of a call that a step does not have."""


def _find_counter(trainer: Any) -> SamplesCallback | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, SamplesCallback)), None)


def counts_samples(trainer: Any) -> bool:
    """Returns whether a trainer's data decide how many calls each step has."""
    return _find_counter(trainer) is not None


def take_step_batches(
    original: Callable, self: Any, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any
) -> tuple[list, Any]:
    """Returns the batches of one step, after a `NoCall` for each missing one, and the number of their targets, `()`."""
    counter = _find_counter(self)
    calls = num_batches if counter is None else counter.calls(num_batches)
    batches, count = original(self, epoch_iterator, calls, *args, **kwargs)
    return [NoCall() for _ in range(num_batches - calls)] + batches, count


def skip_missing_call(original: Callable, self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """Returns a loss of zero, `()`, for a call that the step does not have.

    Raises:
        DataError: steps have other numbers of calls than they had, and the loss is multiplied by that number.
    """
    if isinstance(inputs, NoCall):
        # Stock takes a mean over all that it collected, where a loss is none over targets.
        self.current_gradient_accumulation_steps -= 1
        return torch.zeros((), device=self.args.device)
    counter = _find_counter(self)
    is_scaled = self.loss_is_scaled_for_ga is not None or not isinstance(num_items_in_batch, torch.Tensor)
    if is_scaled or counter is None or not counter.is_loss_unknown:
        return original(self, model, inputs, num_items_in_batch)
    with _Uses(num_items_in_batch) as uses:
        loss = original(self, model, inputs, num_items_in_batch)
    counter.is_loss_unknown = False
    _require_no_router_loss(self.model)
    _require_use(uses.found, self)
    return loss


class _Uses(TorchFunctionMode):
    """Sees whether a number, or what is made of it, is computed with."""

    def __init__(self, number: torch.Tensor):
        super().__init__()
        self.numbers, self.found = [number], False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(value is number for value in (*args, *(kwargs or {}).values()) for number in self.numbers):
            self.found |= getattr(func, "__name__", "") in _ARITHMETIC
            if isinstance(result, torch.Tensor):
                self.numbers.append(result)
        return result


def _require_no_router_loss(model: Any) -> None:
    # A module of one's own has no config.
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        config = config.get_text_config()
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise DataError(
            "output_router_logits=True: routers' losses are added in each call, and steps have other numbers of calls "
            "than they had. Set router_aux_loss_coef to 0, or keep the number of calls."
        )


def _require_use(is_used: bool, trainer: Any) -> None:
    if dist.is_initialized():
        # Of a pipeline one stage computes the loss.
        used = torch.tensor(int(is_used), device=trainer.args.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        is_used = bool(used)
    if not is_used:
        raise DataError(
            f"the loss of {type(trainer.model).__name__} does not divide by num_items_in_batch: Trainer adds those of "
            "a step's calls up, and steps have other numbers of calls than they had. Set trainer.loss_is_scaled_for_ga "
            "= False, which has Trainer take their mean."
        )


def skip_missing_tokens(original: Callable, self: Any, inputs: Any) -> None:
    """Counts no token of a call that the step does not have."""
    if not isinstance(inputs, NoCall):
        original(self, inputs)


def skip_missing_operations(original: Callable, self: Any, inputs: Any) -> float:
    """Counts no operation of a call that the step does not have."""
    return 0.0 if isinstance(inputs, NoCall) else original(self, inputs)

"""Batch-size ramp-up in Trainer: steps with fewer microbatches than `gradient_accumulation_steps`.

Upstream counts `training_step` calls to find the end of a step and expects the same number for each step. Steps with
fewer microbatches are filled with leading calls that do nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from ...errors import DataError
from .sample_counter import SamplesCallback

# Operations through which a loss uses the number of its targets; other operations only inspect or move the tensor.
_ARITHMETIC = frozenset(
    ("div", "div_", "divide", "true_divide", "__truediv__", "__rtruediv__", "__itruediv__", "reciprocal")
    + ("mul", "mul_", "multiply", "__mul__", "__rmul__", "item", "tolist", "__float__", "__int__")
)


class NoCall(dict):
    """Inputs of a placeholder call in a step with fewer microbatches."""


def _find_counter(trainer: Any) -> SamplesCallback | None:
    return next((one for one in trainer.callback_handler.callbacks if isinstance(one, SamplesCallback)), None)


def counts_samples(trainer: Any) -> bool:
    """Returns whether a trainer's data determines how many microbatches each step has."""
    return _find_counter(trainer) is not None


def take_step_batches(
    original: Callable, self: Any, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any
) -> tuple[list, Any]:
    """Returns the batches of one step, preceded by a `NoCall` for each missing one, and the target count, `()`."""
    counter = _find_counter(self)
    calls = num_batches if counter is None else counter.calls(num_batches)
    batches, count = original(self, epoch_iterator, calls, *args, **kwargs)
    return [NoCall() for _ in range(num_batches - calls)] + batches, count


def skip_missing_call(original: Callable, self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """Returns a zero loss, `()`, for a placeholder call.

    Raises:
        DataError: the number of microbatches per step changes, and the loss does not divide by the target count.
    """
    if isinstance(inputs, NoCall):
        # Upstream averages over all collected batches if a loss is not divided by its targets; leave the placeholder
        # out.
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
    """Records whether a tensor, or a value derived from it, is used in arithmetic."""

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
    # A custom module has no config.
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        config = config.get_text_config()
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise DataError(
            "output_router_logits=True is not supported if the number of microbatches per step changes, because "
            "router losses are summed over microbatches. Set router_aux_loss_coef to 0, or keep the number of "
            "microbatches constant."
        )


def _require_use(is_used: bool, trainer: Any) -> None:
    if dist.is_initialized():
        # Only the last pipeline stage computes the loss.
        used = torch.tensor(int(is_used), device=trainer.args.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        is_used = bool(used)
    if not is_used:
        raise DataError(
            f"The loss of {type(trainer.model).__name__} ignores num_items_in_batch, so Trainer sums the losses of a "
            "step's microbatches, but their number changes between steps. Set trainer.loss_is_scaled_for_ga = False, "
            "so that Trainer averages them."
        )


def skip_missing_tokens(original: Callable, self: Any, inputs: Any) -> None:
    """Counts no tokens for a placeholder call."""
    if not isinstance(inputs, NoCall):
        original(self, inputs)


def skip_missing_operations(original: Callable, self: Any, inputs: Any) -> float:
    """Counts no FLOPs for a placeholder call."""
    return 0.0 if isinstance(inputs, NoCall) else original(self, inputs)

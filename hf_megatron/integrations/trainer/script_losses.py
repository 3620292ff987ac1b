"""Losses that replace Trainer's own: `compute_loss_func`, and `compute_loss` of a subclass.

A data-parallel rank computes them from its own samples. Means of torch's loss functions over the labels, and terms
divided by `num_items_in_batch`, get their single-process value. Other losses are averaged over the ranks, as under
DistributedDataParallel; the first calls compare the ranks' values and warn.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...compat.shared import Shared
from ...core.communication.rank_errors import gather
from ...errors import RankError
from ...losses.batch_loss import BatchLoss
from ...losses.loss_terms import CHECKED_CALLS, differ_between_ranks, subtract_terms
from ...losses.script_losses import CountUses, ItemCount, know_script_batch, with_script_targets, with_uses
from ...parallel_state import parallel_state
from ..accelerate.replicas import watch_reads

# Packages whose trainers normalize their losses themselves, or are adapted by this library.
_LIBRARIES = ("transformers.", "trl.", "sentence_transformers.", "hf_megatron.")
# Of these, trainers with Trainer's own loss, which a script's subclass may replace.
_PLAIN_TRAINERS = ("transformers.trainer.", "transformers.trainer_seq2seq.", "trl.trainer.sft_trainer.")
_OVERRIDE = "_hf_megatron_compute_loss"


def adapt_script_losses(trainer: Any, batch: BatchLoss, *, averages_tokens: bool) -> None:
    """Wraps a trainer's `compute_loss_func`, and a `compute_loss` that a script overrides, on data-parallel ranks.

    Args:
        averages_tokens (`bool`): `TrainingArguments.average_tokens_across_devices` as the script has set it.
    """
    if not batch.has_data_parallel:
        return
    if trainer.compute_loss_func is not None:
        trainer.compute_loss_func = LossFunction(trainer.compute_loss_func, batch)
    override = type(trainer).compute_loss
    libraries = (f"{cls.__module__}." for cls in type(trainer).__mro__)
    replaced = next(module for module in libraries if module.startswith(_LIBRARIES))
    if not f"{override.__module__}.".startswith(_LIBRARIES) and replaced in _PLAIN_TRAINERS:
        wrapped = OverriddenLoss(trainer.compute_loss, batch, averages_tokens=averages_tokens)
        trainer.compute_loss = vars(trainer)[_OVERRIDE] = wrapped


def compute_loss(original: Callable, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes Trainer's own loss, `()`, which an overridden `compute_loss` may build on."""
    override = vars(self).get(_OVERRIDE)
    if override is None or not override.is_running:
        return original(self, model, inputs, *args, **kwargs)
    bound = inspect.signature(original).bind(self, model, inputs, *args, **kwargs)
    if isinstance(count := bound.arguments.get("num_items_in_batch"), ItemCount):
        bound.arguments["num_items_in_batch"] = override.global_count(count)
    return override.with_known_loss(original(*bound.args, **bound.kwargs))


def has_script_loss(trainer: Any) -> bool:
    """Returns whether a data-parallel trainer's `compute_loss` is overridden by a script."""
    return trainer.model is not None and parallel_state(trainer.model) is not None and _OVERRIDE in vars(trainer)


class _ScriptLoss(Shared):
    """Comparison of a script's loss over the data-parallel ranks.

    Args:
        function (`Callable`): the script's function.
        batch (`BatchLoss`): of the model.
    """

    def __init__(self, function: Callable, batch: BatchLoss):
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.function, self.batch = function, batch
        self._checked_calls = 0

    @property
    def is_checked(self) -> bool:
        """Whether the current call compares the ranks' losses."""
        return self._checked_calls < CHECKED_CALLS and torch.is_grad_enabled()

    def _compare(self, loss: Any, rest: Tensor | None) -> None:
        """Warns if a loss differs between the ranks, without the terms whose differences are right.

        Collective: every rank calls it in each checked call, because a script may compute its loss otherwise on some.

        Args:
            loss (`Tensor`): scalar.
            rest (`Tensor`, *optional*): scalar, its remainder without these terms; `None` if that is unknown.
        """
        self._checked_calls += 1
        values = None if rest is None else (float(rest), abs(float(loss.detach())), torch.finfo(loss.dtype).eps)
        doing, group = "Comparing the losses of data-parallel ranks", self.batch.mesh.host_group("dp")
        gathered = gather(values, group, doing, error_type=RankError)
        if any(values is None for values in gathered):
            return
        rests, losses, precisions = zip(*gathered, strict=True)
        if differ_between_ranks(rests, scale=max(losses), precision=max(precisions)):
            self._checked_calls = CHECKED_CALLS
            warnings.warn(
                f"{self.name} returns another loss on each data-parallel rank; their mean is used, as under "
                "DistributedDataParallel. For the single-process value, use means of torch.nn.functional's losses over "
                "`labels`, or divide sums by num_items_in_batch.",
                stacklevel=4,
            )

    @property
    def name(self) -> str:
        """Name of the script's function."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)


class LossFunction(_ScriptLoss):
    """`compute_loss_func` of a data-parallel trainer."""

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        """Returns the loss, a scalar, that Trainer multiplies by the number of ranks if there is a count."""
        batch, ranks = self.batch, self.batch.mesh.dp_size
        uses = CountUses(float(ranks))
        if not batch.over_ranks:
            return self.function(outputs, labels, num_items_in_batch=num_items_in_batch, **kwargs)
        count = None if num_items_in_batch is None else with_uses(num_items_in_batch, uses)
        loss = self.function(outputs, know_script_batch(labels, batch), num_items_in_batch=count, **kwargs)
        if self.is_checked:
            # A count that was read as a number leaves no terms.
            is_known = uses.shares or not uses.is_used
            self._compare(loss, subtract_terms(loss, uses.shares)[0] if is_known else None)
        # Trainer's factor is right for a sum divided by the number in the count. It must not apply to means, and terms
        # divided by the count itself have it already.
        is_unscaled = num_items_in_batch is None or (uses.is_used and not uses.shares)
        return loss if is_unscaled else loss / ranks


class OverriddenLoss(_ScriptLoss):
    """`compute_loss` of a data-parallel trainer's subclass.

    Trainer does not multiply its result by the number of ranks, although `num_items_in_batch` counts the targets of all
    of them. The first call shows whether the method does so itself.

    Args:
        averages_tokens (`bool`): whether the count covers all ranks; otherwise it is the mean of the ranks' counts.

    Attributes:
        is_running: whether a call is being computed.
    """

    def __init__(self, function: Callable, batch: BatchLoss, *, averages_tokens: bool):
        super().__init__(function, batch)
        self.averages_tokens, self.is_running = averages_tokens, False
        self._factor: float | None = None if averages_tokens else 1.0
        self._known: list[Tensor] = []

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss, a scalar, or the loss and the model's outputs."""
        batch = self.batch
        if not batch.over_ranks or not isinstance(inputs, Mapping):
            return self.function(model, inputs, *args, **kwargs)
        uses = CountUses(1.0 if self._factor is None else self._factor)
        if isinstance(count := kwargs.get("num_items_in_batch"), Tensor):
            kwargs["num_items_in_batch"] = with_uses(count if self.averages_tokens else count / self._ranks, uses)
        self._known, self.is_running = [], True
        try:
            with watch_reads() as reads:
                result = self.function(model, with_script_targets(inputs, batch), *args, **kwargs)
        finally:
            self.is_running = False
        loss = result[0] if isinstance(result, tuple) else result
        if not self.is_checked:
            return result
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            self._compare(loss, None)
            return result
        rest, factors = subtract_terms(loss, [*uses.shares, *self._known])
        shares = list(zip(factors, uses.shares, strict=False))
        if self._factor is None and shares and any(factor for factor, _ in shares):
            # A method that multiplies by the number of ranks reads that number; if it did so before, its terms have it
            # as their factor.
            multiplies = len(reads) > 0 or any(factor == self._ranks for factor, _ in shares)
            self._factor = 1.0 if multiplies else float(self._ranks)
            loss = loss + (self._factor - 1) * sum(factor * share for factor, share in shares)
        self._compare(loss, rest)
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    @property
    def _ranks(self) -> int:
        return self.batch.mesh.dp_size

    def global_count(self, count: ItemCount) -> Tensor:
        """Returns the number of targets of all ranks, a scalar, for Trainer's own loss."""
        plain = count.as_subclass(Tensor)
        return plain if self.averages_tokens else plain * self._ranks

    def with_known_loss(self, result: Any) -> Any:
        """Records Trainer's own loss, whose differences between the ranks are right, and returns its result."""
        loss = result[0] if isinstance(result, tuple) else result
        if not self.is_checked or not loss.requires_grad:
            return result
        self._known.append(loss)
        # A copy: the script may change it in place.
        return (loss.clone(), *result[1:]) if isinstance(result, tuple) else loss.clone()

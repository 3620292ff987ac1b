"""Losses that a training script computes: labels that know their batch, and a count that knows how it is used.

A script that replaces Trainer's loss sees the samples of one data-parallel rank. With the labels of this module, means
of torch's loss functions are taken over the samples of all ranks, as inside a model (`inline_losses.py`). The count
`num_items_in_batch` shows which terms were divided by it: their sum over the ranks is the single-process value.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core.forward_hooks import ForwardHooks
from .batch_loss import BatchLoss
from .inline_losses import BatchLabels, get_output_loss, know_batch, with_loss
from .targets import is_target

_COUNT = "num_items_in_batch"
# The result is the count in another form.
_SAME_COUNT = {Tensor.to, Tensor.float, Tensor.double, Tensor.clone, Tensor.detach, Tensor.cpu, Tensor.cuda}
_DIVISIONS = {Tensor.__truediv__, Tensor.__itruediv__, Tensor.div, Tensor.div_, torch.div, torch.true_divide}


class ScriptLabels(BatchLabels):
    """Labels of any shape in a loss that a script computes: reductions other than means are left to the script."""

    in_model = False


@dataclass
class CountUses:
    """Uses of `num_items_in_batch` in one loss.

    Attributes:
        factor (`float`): multiplies every term that is divided by the count.
        is_used (`bool`): whether the count was read at all.
        shares: terms that were divided by the count of all ranks, of any shape; each rank has its part of the sum.
    """

    factor: float = 1.0
    is_used: bool = False
    shares: list[Tensor] = field(default_factory=list)

    def add(self, share: Tensor) -> Tensor:
        """Records a term, of any shape, and returns it multiplied by the factor."""
        share = share * self.factor if self.factor != 1 else share
        self.shares.append(share)
        return share


class ItemCount(Tensor):
    """Number of targets of all ranks, a scalar, that records its uses."""

    uses: CountUses

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Calls a function with plain tensors and records it."""
        kwargs = kwargs or {}
        # Also in a list, as in `torch.stack([count, ...])`.
        uses = next(value.uses for value in tree_leaves((args, kwargs)) if isinstance(value, cls))
        divides = function in _DIVISIONS and not isinstance(args[0], cls)
        args, kwargs = tree_map_only(Tensor, _plain, (args, kwargs))
        result = function(*args, **kwargs)
        if function in _SAME_COUNT:
            return with_uses(result, uses)
        # Reading an attribute such as the device does not use the value.
        uses.is_used |= getattr(function, "__name__", "") != "__get__"
        return uses.add(result) if divides and isinstance(result, Tensor) else result


def with_uses(count: Any, uses: CountUses) -> Any:
    """Returns a count, a scalar, that records its uses; values other than tensors are returned as is."""
    if not isinstance(count, Tensor):
        # The uses of a number cannot be seen.
        uses.is_used = True
        return count
    counted = count.as_subclass(ItemCount)
    counted.uses = uses
    return counted


def know_script_batch(labels: Any, batch: BatchLoss) -> Any:
    """Attaches a batch to the labels of a loss that a script computes, of any shape, also in tuples."""
    return know_batch(labels, batch, kind=ScriptLabels)


def with_script_targets(inputs: Mapping[str, Any], batch: BatchLoss) -> Any:
    """Returns a copy of a batch whose targets are `ScriptLabels`."""
    copied: Any = copy.copy(inputs)
    for name, value in inputs.items():
        if is_target(name):
            copied[name] = know_script_batch(value, batch)
    return copied


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, ItemCount | ScriptLabels) else value


class ScriptLossHooks:
    """Model hooks that pass a script's labels and count on as plain tensors, and record a loss divided by the count."""

    def __init__(self) -> None:
        self._uses: list[CountUses | None] = []

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the functions in a model's table of hooks."""
        hooks.add("script loss", self._enter, self._leave, always_exit=True)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        count = kwargs.get(_COUNT)
        self._uses.append(count.uses if isinstance(count, ItemCount) else None)
        return tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        uses = self._uses.pop() if self._uses else None
        if uses is None or output is None or (loss := get_output_loss(output, takes_loss=True)) is None:
            return None
        return with_loss(output, uses.add(loss))

"""Comparison of a training call on the ranks of a layout with the same call of the single-process model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_megatron import local_named_parameters
from tests.helpers.training import gather_full_tensors, shard_batch

LossOfCall = Callable[[Any, dict[str, Any]], Tensor]


def compute_own_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Returns the loss that the model computes from the labels of a batch."""
    return model(**batch).loss


def require_same_step(
    model: Any, single: Any, batch: dict[str, Any], compute_loss: LossOfCall = compute_own_loss
) -> None:
    """Raises unless loss and gradients of a training call equal those of the single-process model.

    Args:
        model: the model on the ranks of a layout; every rank calls this function.
        single: the same model in a single process, loaded on every rank.
        batch: the batch of all data-parallel ranks.
        compute_loss (`Callable`): (model, batch of this rank) -> loss.
    """
    model.zero_grad()
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    loss = compute_loss(model, batch | shard_batch(model, tensors))
    loss.backward()
    single.zero_grad()
    expected = compute_loss(single, batch)
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-5, atol=2e-6)
    require_same_gradients(model, single)


def require_same_gradients(model: Any, single: Any) -> None:
    """Raises unless the gradients of a model equal those of the single-process model; they are gathered on one rank."""
    gradients = {name: parameter.grad for name, parameter in local_named_parameters(model)}
    expected = {name: parameter.grad for name, parameter in single.named_parameters()}
    gathered = gather_full_tensors(model, gradients)
    if gathered:
        assert gathered.keys() == expected.keys()
    for name, gradient in gathered.items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            with torch.no_grad():
                error = (gradient - expected[name]).abs().max()
                limit = 1e-4 * expected[name].abs().max() + 1e-6
            assert error <= limit, (name, error, limit)

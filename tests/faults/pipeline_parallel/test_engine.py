"""Tests of seeded faults in gradient scaling of a pipelined loop: each must change Trainer's log or the gradients."""

import pytest

from hf_megatron import RankError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.grad_reducer import GradientReducer
from hf_megatron.data_parallel.grad_store import PlainGradients
from hf_megatron.integrations.trainer import pipeline as integration
from hf_megatron.pipeline_parallel.loss_grad_scale import ScheduledGradients
from hf_megatron.pipeline_parallel.tied_weight_grads import TiedGradients
from tests.helpers.dp_training import count_ranks
from tests.helpers.references import train_single_process
from tests.integration.pipeline_parallel.test_accelerate import (
    compute_mixed_loss_gradients,
    compute_preference_gradients,
    max_gradient_error,
)
from tests.integration.pipeline_parallel.test_trainer import (
    PP2,
    VaryingLossScale,
    layout,
    max_relative_difference,
    train,
)

STORES = (PlainGradients, GradientReducer)
ACCUMULATED = {"max_steps": 2, "trainer_class": VaryingLossScale}


def double_later_batches():
    for store in STORES:
        original = store.flush

        def flush(self, sums, factor, original=original, **kwargs):
            return original(self, sums, factor if self.is_empty else 2 * factor, **kwargs)

        store.flush = flush


def drop_later_batches():
    for store in STORES:
        original = store.flush

        def flush(self, sums, factor, original=original, **kwargs):
            return original(self, sums, factor if self.is_empty else 0.0, **kwargs)

        store.flush = flush


def ignore_backward_scale():
    original = ScheduledGradients.finalize
    ScheduledGradients.finalize = lambda self, scale, **kwargs: original(self, self.seed, **kwargs)


def rescale_accumulated_gradients():
    """Scales the gradients accumulated so far by the factor of the current batch."""
    original = PlainGradients.flush

    def flush(self, sums, factor, **kwargs):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return original(self, sums, factor, **kwargs)

    PlainGradients.flush = flush


def skip_accumulation_division():
    original = integration._scale
    integration._scale = lambda trainer, has_count: original(trainer, has_count) * 2


def accumulate_gradients_directly():
    """Accumulates directly although the first batch has another factor."""
    original = ScheduledGradients.for_training.__func__

    def for_training(cls, scale, *args, **kwargs):
        gradients = original(cls, scale, *args, **kwargs)
        gradients.is_direct = True
        scale.await_backward(gradients)
        return gradients

    ScheduledGradients.for_training = classmethod(for_training)


@pytest.fixture(scope="module")
def log(stories, tmp_path_factory):
    [(log, _)] = run_ranks(train, 1, stories, tmp_path_factory.mktemp("one"), None, **ACCUMULATED)
    return log


def run_with_fault(fault, function, *args, **kwargs):
    fault()
    return function(*args, **kwargs)


def apply_no_fault():
    """Control case: without a fault the comparison passes."""


@pytest.mark.parametrize(
    "fault",
    [
        apply_no_fault,
        double_later_batches,
        drop_later_batches,
        ignore_backward_scale,
        rescale_accumulated_gradients,
        accumulate_gradients_directly,
    ],
)
def test_accumulation(stories, tmp_path, log, fault):
    try:
        results = run_ranks(run_with_fault, 2, fault, train, stories, tmp_path, PP2, **ACCUMULATED)
    except RankError:
        assert fault is accumulate_gradients_directly, "they are there already"
        return
    assert (max_relative_difference(results[0][0], log) < 2e-6) == (fault is apply_no_fault)


def test_wrong_announced_scale_is_detected(stories, tmp_path):
    """The mismatch is detected before gradients are accumulated with the wrong scale."""
    results = run_ranks(run_with_fault, 2, skip_accumulation_division, train, stories, tmp_path, PP2, max_steps=2)
    assert all(sums for _, sums in results), "it was believed"
    assert max_relative_difference(results[0][0], train_single_process(train, stories, max_steps=2)[0]) < 2e-6


def skip_tied_gradient_sum():
    TiedGradients.sum = lambda self: None


def flush_with_unit_factor():
    ScheduledGradients.flush = lambda self, factor, keep: self.store.flush(self._stashed, 1.0, keep=keep)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (compute_preference_gradients, skip_tied_gradient_sum),
        (compute_mixed_loss_gradients, flush_with_unit_factor),
    ],
)
def test_faults_in_multi_forward_losses_are_detected(stories, function, fault):
    result = lambda found: found[0] if function is compute_preference_gradients else found  # noqa: E731
    [expected] = run_ranks(function, 1, stories, None)
    config = layout(dp_size=2, zero_stage=2, num_microbatches=2)
    results = run_ranks(run_with_fault, count_ranks(config), fault, function, stories, config)
    assert max_gradient_error([result(rank) for rank in results], result(expected)) > 1e-3

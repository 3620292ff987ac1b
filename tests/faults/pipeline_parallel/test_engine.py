"""Faults in how a pipeline and a loop agree about gradients: each must show in Trainer's log or in the gradients."""

import pytest

from hf_megatron import RankError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.grad_reducer import GradientReducer
from hf_megatron.data_parallel.grad_store import PlainGradients
from hf_megatron.integrations.trainer import pipeline as integration
from hf_megatron.pipeline_parallel.loss_grad_scale import ScheduledGradients
from hf_megatron.pipeline_parallel.tied_weight_grads import TiedGradients
from tests.helpers.dp_training import ranks_of
from tests.helpers.references import trained_alone
from tests.integration.pipeline_parallel.test_accelerate import mixed, preferences, worst
from tests.integration.pipeline_parallel.test_trainer import PP2, OwnLoss, apart, layout, train

STORES = (PlainGradients, GradientReducer)
ACCUMULATED = {"max_steps": 2, "trainer_class": OwnLoss}


def count_a_batch_of_a_step_twice():
    for store in STORES:
        original = store.flush

        def flush(self, sums, factor, original=original, **kwargs):
            return original(self, sums, factor if self.is_empty else 2 * factor, **kwargs)

        store.flush = flush


def lose_all_but_the_first_batch_of_a_step():
    for store in STORES:
        original = store.flush

        def flush(self, sums, factor, original=original, **kwargs):
            return original(self, sums, factor if self.is_empty else 0.0, **kwargs)

        store.flush = flush


def ignore_what_backward_brings():
    original = ScheduledGradients.finalize
    ScheduledGradients.finalize = lambda self, scale, **kwargs: original(self, self.seed, **kwargs)


def scale_the_sum_and_not_the_call():
    """As if a batch's factor counted for everything that is there."""
    original = PlainGradients.flush

    def flush(self, sums, factor, **kwargs):
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return original(self, sums, factor, **kwargs)

    PlainGradients.flush = flush


def forget_the_division_by_accumulation():
    original = integration._scale
    integration._scale = lambda trainer, has_count: original(trainer, has_count) * 2


def let_gradients_join_the_sums_at_once():
    """As if every factor had been announced: that of the first batch is another one."""
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


def sabotaged(fault, function, *args, **kwargs):
    fault()
    return function(*args, **kwargs)


def nothing():
    """No fault: the comparison passes."""


@pytest.mark.parametrize(
    "fault",
    [
        nothing,
        count_a_batch_of_a_step_twice,
        lose_all_but_the_first_batch_of_a_step,
        ignore_what_backward_brings,
        scale_the_sum_and_not_the_call,
        let_gradients_join_the_sums_at_once,
    ],
)
def test_accumulation(stories, tmp_path, log, fault):
    try:
        found = run_ranks(sabotaged, 2, fault, train, stories, tmp_path, PP2, **ACCUMULATED)
    except RankError:
        assert fault is let_gradients_join_the_sums_at_once, "they are there already"
        return
    assert (apart(found[0][0], log) < 2e-6) == (fault is nothing)


def test_a_wrong_announcement_of_the_integration_is_found_out(stories, tmp_path):
    """Before gradients are added by it."""
    found = run_ranks(sabotaged, 2, forget_the_division_by_accumulation, train, stories, tmp_path, PP2, max_steps=2)
    assert all(sums for _, sums in found), "it was believed"
    assert apart(found[0][0], trained_alone(train, stories, max_steps=2)[0]) < 2e-6


def leave_tied_weights_to_each_end():
    TiedGradients.sum = lambda self: None


def take_sums_of_unknown_scale_for_known():
    ScheduledGradients.flush = lambda self, factor, keep: self.store.flush(self._stashed, 1.0, keep=keep)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (preferences, leave_tied_weights_to_each_end),
        (mixed, take_sums_of_unknown_scale_for_known),
    ],
)
def test_losses_of_several_forwards(stories, function, fault):
    result = lambda found: found[0] if function is preferences else found  # noqa: E731
    [expected] = run_ranks(function, 1, stories, None)
    config = layout(dp_size=2, zero_stage=2, num_microbatches=2)
    try:
        found = run_ranks(sabotaged, ranks_of(config), fault, function, stories, config)
    except RankError:
        return
    assert worst([result(rank) for rank in found], result(expected)) > 1e-3

"""Faults in how a pipeline and a loop agree about gradients: each must show in Trainer's log or in the gradients."""

import pytest

from hf_megatron import RankError
from hf_megatron.data_parallel.gradient_store import PlainGradients
from hf_megatron.data_parallel.reduction import GradientReducer
from hf_megatron.integrations import trainer_pipeline as integration
from hf_megatron.pipeline_parallel import engine
from hf_megatron.pipeline_parallel.loss_scale import LossScale, ScheduledGradients
from hf_megatron.verify.ranks import run_ranks
from tests.integration.dp_training import ranks_of
from tests.integration.test_pipeline_accelerate import mixed, preferences, worst
from tests.integration.test_pipeline_trainer import PP2, OwnLoss, apart, layout, train

STORES = (PlainGradients, GradientReducer)
ACCUMULATED = {"max_steps": 2, "trainer_class": OwnLoss}


def count_a_batch_of_a_step_twice():
    for store in STORES:
        original = store.add

        def add(self, other, factor, original=original):
            original(self, other, 2 * factor)

        store.add = add


def lose_all_but_the_first_batch_of_a_step():
    for store in STORES:
        store.add = lambda self, other, factor: None


def ignore_what_backward_brings():
    original = ScheduledGradients.settle
    ScheduledGradients.settle = lambda self, scale: original(self, self.seed)


def scale_the_sum_and_not_the_call():
    """As if the first batch's factor came after the second batch was added."""
    original = ScheduledGradients.settle

    def settle(self, scale):
        original(self, scale)
        if not self.is_direct:
            self.store.scale(scale / self.seed)

    ScheduledGradients.settle = settle


def forget_the_division_by_accumulation():
    original = integration._scale
    integration._scale = lambda trainer, has_count: original(trainer, has_count) * 2


def begin_every_forward_with_empty_sums():
    """As if nothing had been added up before: the sum is scaled instead of the call."""
    for store in STORES:
        store.is_empty = True


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
        begin_every_forward_with_empty_sums,
    ],
)
def test_accumulation(stories, tmp_path, log, fault):
    try:
        found = run_ranks(sabotaged, 2, fault, train, stories, tmp_path, PP2, **ACCUMULATED)
    except RankError:
        assert fault is begin_every_forward_with_empty_sums, "its losses are not the only ones any more"
        return
    assert (apart(found[0][0], log) < 2e-6) == (fault is nothing)


def test_a_wrong_announcement_of_the_integration_is_an_error(stories, tmp_path):
    with pytest.raises(RankError, match="received the gradient 1.0, the loop announced 2.0"):
        run_ranks(sabotaged, 2, forget_the_division_by_accumulation, train, stories, tmp_path, PP2)


def reduce_with_every_reverse_pipeline():
    """As if the first of two forwards that one backward reaches were the last."""
    engine.at_end_of_backward = lambda function: function()
    GradientReducer.complete = lambda self: None


def mix_sums_of_unknown_scale():
    LossScale.waited_for = lambda self: None


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (preferences, reduce_with_every_reverse_pipeline),
        (mixed, mix_sums_of_unknown_scale),
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

"""Tests of batch size ramp-up against Megatron-Core's microbatch calculator."""

import itertools
import random

import pytest
import torch

from hf_megatron.datasets.ramp_up import BatchRampUp
from hf_megatron.datasets.schedules import MegatronSchedule, MegatronScheduler
from hf_megatron.errors import DataError


def draw_ramp_up(seed):
    generator = random.Random(seed)
    start, increment = generator.randrange(1, 9), generator.randrange(1, 9)
    return BatchRampUp(start + increment * generator.randrange(0, 9), start, increment, generator.randrange(1, 300))


@pytest.mark.parametrize("seed", range(60))
def test_equals_megatron_core(seed):
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    sizes, consumed = draw_ramp_up(seed), 0
    if sizes.start == sizes.global_batch_size:
        # Megatron's calculator divides by the number of increments, which is zero here.
        assert sizes.batch_size(0) == sizes.batch_size(10**6) == sizes.start
        return
    peer = module.RampupBatchsizeNumMicroBatchesCalculator(
        sizes.global_batch_size, 1, 1, False, 0, sizes.start, sizes.increment, sizes.samples
    )
    ends = []
    for _ in range(200):
        peer.update(consumed, True)
        assert sizes.batch_size(consumed) == peer.get_current_global_batch_size() in sizes.batch_sizes()
        consumed += peer.get_current_global_batch_size()
        ends.append(consumed)
    assert [sizes.after(steps + 1) for steps in range(200)] == ends
    assert sizes.after(30, ends[20]) == ends[50]
    for samples in range(0, ends[150], 7):
        full_steps = sum(1 for end in ends if end <= samples)
        assert sizes.full_steps(0, samples) == full_steps
    assert sizes.full_steps(ends[9], ends[40]) == 31


def test_step_counts_match_megatron():
    """Expected values are worked out by hand from `update_train_iters` in `megatron/training/training.py`."""
    sizes = BatchRampUp(8, start=2, increment=2, samples=12)
    # Batch sizes 2, 4 and 6 for 4 samples each, then 8 after 12 samples.
    assert [sizes.batch_size(consumed) for consumed in (0, 2, 4, 8, 12, 13, 14)] == [2, 2, 4, 6, 8, 8, 8]
    assert list(itertools.accumulate([2, 2, 4, 6, 8, 8])) == [sizes.after(steps) for steps in range(1, 7)]
    assert sizes.steps(14) == 4
    assert sizes.steps(21) == 4
    assert sizes.steps(22) == 5
    # The ramp-up step that begins at sample 8 counts although it extends beyond sample 9.
    assert sizes.steps(9) == 4


def test_schedule_counts_samples_per_step():
    sizes = BatchRampUp(8, start=2, increment=2, samples=12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = MegatronSchedule(1.0, decay=100, style="linear", end_weight_decay=0.0, start_weight_decay=0.0)
    scheduler, rates = MegatronScheduler(optimizer, schedule, sizes), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([schedule.learning_rate(consumed) for consumed in (0, 2, 4, 8, 14, 22)])
    restored = MegatronScheduler(optimizer, schedule, sizes)
    restored.load_state_dict(scheduler.state_dict())
    assert restored.samples == scheduler.samples == 30


@pytest.mark.parametrize("numbers", [(8, 0, 2, 4), (8, 2, 4, 10), (8, 10, 2, 10), (8, 2, 2, 0), ("8", 2, 2, 4)])
def test_invalid_ramp_up_is_rejected(numbers):
    with pytest.raises(DataError, match="expected integers of 1 or more|is not a multiple of the increment"):
        BatchRampUp(*numbers)

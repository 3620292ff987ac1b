"""Tests of the planner's memory of activations that ranks hold, for every registered schedule."""

import pytest

from hf_megatron.pipeline_parallel.schedule_simulator import most_held
from hf_megatron.pipeline_parallel.schedules import SCHEDULES, computations
from hf_megatron.planner.rank_memory import _held


@pytest.mark.parametrize("name", SCHEDULES)
def test_held_activations_match_the_full_order(name):
    """Schedules whose memory stops growing are computed with fewer microbatches."""
    per_rank = SCHEDULES[name].resolve(None)
    kept = tuple(range(1, 2 * per_rank + 1))
    for microbatches in filter(lambda count: SCHEDULES[name].runs(2, per_rank, count), range(1, 25)):
        orders = computations(name, 2, per_rank, microbatches)
        expected = tuple(most_held(order, dict(enumerate(kept))) for order in orders)
        assert _held(name, 2, per_rank, microbatches, kept) == expected

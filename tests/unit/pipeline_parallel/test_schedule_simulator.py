"""Tests of the schedule simulator against closed forms, hand-computed steps and schedule plans."""

import json
from collections import Counter

import pytest

from hf_megatron.core.spans import bubble_share
from hf_megatron.diagnostics.timeline import to_perfetto
from hf_megatron.errors import ConfigError
from hf_megatron.pipeline_parallel.schedule_simulator import (
    StageCosts,
    bubble,
    live_microbatches,
    most_held,
    simulate,
    simulate_orders,
    simulated_seconds,
    simulated_timeline,
)
from hf_megatron.pipeline_parallel.schedules import Action, Kind, assign_stage_ranks, computations, rank_actions

COSTS = StageCosts(1.0, 1.0, 1.0)
SCHEDULE_SIZES = (
    ("gpipe", 4, 1, 8),
    ("1f1b", 4, 1, 8),
    ("interleaved_1f1b", 4, 2, 8),
    ("interleaved_zero_bubble", 4, 2, 8),
    ("zbv", 4, 2, 8),
    ("dualpipev", 4, 2, 8),
    ("looped_bfs", 4, 2, 8),
)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages(name):
    for ranks in (1, 2, 5):
        for microbatches in (1, 4, 9):
            step = simulate(name, ranks, 1, microbatches, [StageCosts(1.0, 0.5, 1.5)] * ranks)
            assert step.duration == pytest.approx(3 * (microbatches + ranks - 1))
            assert step.idle == pytest.approx([3 * (ranks - 1)] * ranks)
            assert step.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_interleaved_stages():
    for stages_per_rank in (1, 2, 3):
        step = simulate("interleaved_1f1b", 4, stages_per_rank, 8, [COSTS] * 4 * stages_per_rank)
        assert step.duration == pytest.approx(3 * (8 * stages_per_rank + 3))


def test_unequal_stages_match_hand_computation():
    """GPipe on 2 ranks, forward 1 and 2, backward 2 and 4, 2 microbatches."""
    step = simulate("gpipe", 2, 1, 2, [StageCosts(1, 1, 1), StageCosts(2, 2, 2)])
    rows = [[(str(action), start, stop) for _, action, start, stop in row] for row in step.spans]
    assert rows == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 9, 11), ("0B1", 13, 15)],
        [("1F0", 1, 3), ("1F1", 3, 5), ("1B0", 5, 9), ("1B1", 9, 13)],
    ]
    assert step.duration == 15 and step.idle == (9, 3) and step.live == (2, 2)


def test_send_times_match_hand_computation():
    """A send occupies the link for 3: the second waits for the first, and no rank blocks on its send."""
    step = simulate("gpipe", 2, 1, 2, [COSTS] * 2, sends=3)
    rows = [[(str(action), start, stop) for _, action, start, stop in row] for row in step.spans]
    assert rows == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 13, 15), ("0B1", 16, 18)],
        [("1F0", 4, 5), ("1F1", 7, 8), ("1B0", 8, 10), ("1B1", 10, 12)],
    ]


def test_short_send_delays_each_rank_once_per_direction():
    for microbatches in (4, 12):
        free, slow = (simulate("gpipe", 4, 1, microbatches, [COSTS] * 4, sends) for sends in (0.0, 0.5))
        assert slow.duration == pytest.approx(free.duration + 2 * 3 * 0.5)


def test_per_stage_send_times():
    costs = [COSTS] * 4
    one, other = (simulate("1f1b", 4, 1, 8, costs, sends).duration for sends in ([0.5, 0.0, 0.0], [0.0, 0.0, 0.5]))
    both = simulate("1f1b", 4, 1, 8, costs, [0.5, 0.0, 0.5]).duration
    assert simulate("1f1b", 4, 1, 8, costs).duration < min(one, other) <= both


def test_stages_on_one_rank_send_nothing():
    """The two middle stages of a V-shaped schedule are on one rank."""
    costs = [COSTS] * 8
    step = simulate("zbv", 4, 2, 8, costs)
    assert simulate("zbv", 4, 2, 8, costs, [0, 0, 0, 99, 0, 0, 0]) == step
    assert simulate("zbv", 4, 2, 8, costs, [0, 0, 1, 0, 0, 0, 0]).duration > step.duration


# The slow rank idles for its first input and after its last gradient. In addition, GPipe waits for its last
# microbatch to come back, 1F1B for its first one.
@pytest.mark.parametrize(("name", "idle"), [("gpipe", 1 + 2 + 6), ("1f1b", 1 + 2 + 2)])
def test_slowest_stage_sets_the_pace(name, idle):
    step = simulate(name, 4, 1, 64, [COSTS, StageCosts(2, 2, 2), COSTS, COSTS])
    assert step.duration == pytest.approx(64 * 6 + idle)
    assert step.idle[1] == min(step.idle) == pytest.approx(idle)


@pytest.mark.parametrize("sizes", SCHEDULE_SIZES)
def test_every_schedule(sizes):
    name, ranks, stages_per_rank, microbatches = sizes
    costs = [StageCosts(1.0, 0.75, 1.0 + 0.125 * stage) for stage in range(ranks * stages_per_rank)]
    step = simulate(*sizes, costs, sends=0.25)
    orders = computations(*sizes)
    assert [[span.action for span in row] for row in step.spans] == [list(order) for order in orders]
    stops = {span.action: span.stop for row in step.spans for span in row}
    for rank, row in enumerate(step.spans):
        assert all(span.rank == rank for span in row)
        assert all(one.stop <= other.start for one, other in zip(row, row[1:], strict=False))
        for span in row:
            assert span.stop - span.start == pytest.approx(costs[span.action.stage].of(span.action.kind))
            if span.action.kind is Kind.FORWARD and span.action.stage:
                before = Action(Kind.FORWARD, span.action.stage - 1, span.action.microbatch)
                assert span.start >= stops[before]
    busy = sum(span.stop - span.start for row in step.spans for span in row)
    assert sum(step.idle) + busy == pytest.approx(ranks * step.duration)
    assert max(stops.values()) == step.duration
    # Communication actions do not change the result.
    assert simulate_orders(rank_actions(*sizes), assign_stage_ranks(*sizes[:3]), costs, 0.25) == step
    assert bubble(*sizes) == pytest.approx(simulate(*sizes, [COSTS] * len(costs)).bubble)


@pytest.mark.parametrize("sizes", SCHEDULE_SIZES)
def test_live_microbatches_match_the_plan(sizes):
    orders = rank_actions(*sizes)
    ends = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    for order in orders:
        live, most = Counter(), Counter()
        for action in order:
            live[action.stage] += (action.kind is Kind.FORWARD) - (action.kind in ends)
            most[action.stage] = max(most[action.stage], live[action.stage])
        live_counts = live_microbatches(orders, sizes[1] * sizes[2])
        assert {stage: live_counts[stage] for stage in most} == most
        assert not any(live.values())
        assert max(most.values()) <= most_held(order, dict.fromkeys(most, 1.0)) <= sum(most.values())


def test_live_microbatches_in_1f1b():
    assert simulate("1f1b", 4, 1, 8, [COSTS] * 4).live == (4, 3, 2, 1)
    assert simulate("gpipe", 4, 1, 8, [COSTS] * 4).live == (8, 8, 8, 8)
    order = computations("1f1b", 2, 1, 8)[0]
    assert most_held(order, {0: 2.5}) == 5.0


@pytest.mark.parametrize("sizes", SCHEDULE_SIZES)
def test_long_steps_are_extrapolated_from_short_ones(sizes):
    name, ranks, stages_per_rank, _ = sizes
    costs = [StageCosts(1.0, 0.75, 1.0 + 0.125 * stage) for stage in range(ranks * stages_per_rank)]
    for microbatches in (8, 60, 96, 128):
        exact = simulate(name, ranks, stages_per_rank, microbatches, costs, 0.25).duration
        estimate = simulated_seconds(name, ranks, stages_per_rank, microbatches, costs, 0.25)
        assert estimate == pytest.approx(exact, rel=0.01)


def test_long_step_is_bounded_by_its_busiest_rank():
    """Stages so unequal that filling the pipeline takes longer than the short steps used for extrapolation."""
    forwards = [1.81, 1.51, 0.76, 0.9, 1.55, 1.35, 1.03, 1.05]
    halves = [1.31, 1.7, 1.24, 1.38, 0.8, 1.54, 0.8, 1.21]
    costs = [StageCosts(forward, half, half) for forward, half in zip(forwards, halves, strict=True)]
    busy_times = [0.0] * 4
    for stage, rank in enumerate(assign_stage_ranks("zbv", 4, 2)):
        busy_times[rank] += forwards[stage] + 2 * halves[stage]
    assert simulated_seconds("zbv", 4, 2, 64, costs, 0.3) >= 64 * max(busy_times)


def test_simulated_step_exports_a_timeline(tmp_path):
    step = simulate("1f1b", 4, 1, 8, [COSTS] * 4, sends=0.25)
    timeline = simulated_timeline(step, "1f1b", 8)
    assert (timeline.ranks, timeline.stages, timeline.microbatches) == (4, 4, 8)
    assert bubble_share(timeline) == pytest.approx(step.bubble)
    assert timeline.duration == pytest.approx(step.duration)
    kinds = Counter(span.kind for spans in timeline.spans for span in spans)
    assert kinds["F"] == kinds["B"] == 32 and kinds["receive_forward"] and kinds["receive_backward"]
    to_perfetto(timeline, tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["otherData"]["ranks"] == 4


def test_invalid_inputs_are_rejected():
    with pytest.raises(ConfigError, match="costs of 3 stages: expected 4"):
        simulate("1f1b", 4, 1, 8, [COSTS] * 3)
    with pytest.raises(ConfigError, match="between 4 pairs of stages: expected 3"):
        simulate("1f1b", 4, 1, 8, [COSTS] * 4, [0.0] * 4)
    with pytest.raises(ConfigError, match="pipeline_schedule"):
        simulate("none", 4, 1, 8, [COSTS] * 4)
    orders = ((Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)), (Action(Kind.FORWARD, 1, 0),))
    with pytest.raises(ConfigError, match="deadlocks: rank 0 at 0B0, rank 1 at 1F0"):
        simulate_orders(orders, (0, 1), [COSTS] * 2)

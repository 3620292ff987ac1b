"""Tests of pipeline schedules in a simulator with blocking sends and receives, and of bubbles against formulas."""

import dataclasses
from collections import Counter

import pytest

from hf_megatron.compat.torch_pipelining import pipeline_orders
from hf_megatron.errors import ConfigError
from hf_megatron.pipeline_parallel import schedules
from hf_megatron.pipeline_parallel.schedule_simulator import bubble
from hf_megatron.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    assign_stage_ranks,
    backward_plan,
    check_schedule,
    forward_plan,
    rank_actions,
    register_schedule,
    schedule,
    valid_microbatches,
)

NAMES = tuple(SCHEDULES)
TORCH_CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "looped_bfs": "ScheduleLoopedBFS",
}
SENDS = {Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1), Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1)}
RECEIVES = {receive: (send, -step) for send, (receive, step) in SENDS.items()}
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def iter_sizes(name):
    """Yields every tested (ranks, stages per rank, microbatches)."""
    for ranks in (2, 3, 4):
        for stages_per_rank in (1, 2, 3):
            if schedule(name).fixed in (None, stages_per_rank):
                for microbatches in (*range(1, 10), 12, 16):
                    if schedule(name).runs(ranks, stages_per_rank, microbatches):
                        yield ranks, stages_per_rank, microbatches


def simulate(actions, placement, *, forwards=True):
    """Runs the actions of all ranks in order and returns a counter of the computations.

    A send blocks until the receiving rank reaches the matching receive. The inputs of an action must be available on
    the same rank: no other action blocks.
    """
    stages = len(placement)
    following = [0] * len(actions)
    done = [set() for _ in actions]

    def peek(rank):
        return actions[rank][following[rank]] if following[rank] < len(actions[rank]) else None

    def find_match(action):
        """Returns the peer rank and its matching send or receive."""
        kind, step = (SENDS | RECEIVES)[action.kind]
        return placement[action.stage + step], Action(kind, action.stage + step, action.microbatch)

    def check_needs(rank, action):
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        assert placement[stage] == rank

        def require(*alternatives):
            required = {Action(one, at, microbatch) for one, at in alternatives}
            assert required & done[rank], f"rank {rank} does {action} without any of {[str(one) for one in required]}"

        if kind is Kind.FORWARD and stage > 0:
            require((Kind.RECEIVE_FORWARD, stage), (Kind.FORWARD, stage - 1))
        if kind in BACKWARDS:
            if forwards:
                require((Kind.FORWARD, stage))
            if stage < stages - 1:
                require((Kind.RECEIVE_BACKWARD, stage), *((one, stage + 1) for one in BACKWARDS))
        if kind is Kind.BACKWARD_WEIGHT:
            require((Kind.BACKWARD_INPUT, stage))
        if kind is Kind.SEND_FORWARD:
            require((Kind.FORWARD, stage))
        if kind is Kind.SEND_BACKWARD:
            require(*((one, stage) for one in BACKWARDS))

    progress = True
    while progress:
        progress = False
        for rank in range(len(actions)):
            while (action := peek(rank)) is not None:
                partner = None
                if action.kind.communicates:
                    partner, match = find_match(action)
                    assert partner != rank, f"{action} stays on rank {rank}"
                    facing = peek(partner)
                    if facing is not None and facing.kind.communicates and find_match(facing)[0] == rank:
                        assert facing == match, f"rank {rank} does {action} while rank {partner} does {facing}"
                    if facing != match:
                        break
                    check_needs(partner, match)
                check_needs(rank, action)
                for one in (rank,) if partner is None else (rank, partner):
                    done[one].add(peek(one))
                    following[one] += 1
                progress = True
    stuck = {rank: str(peek(rank)) for rank in range(len(actions)) if peek(rank) is not None}
    assert not stuck, f"deadlock: {stuck}"
    return Counter(action for order in actions for action in order if not action.kind.communicates)


def list_full_backwards(stage, microbatch):
    """Returns the two valid sets of actions for a full backward."""
    split = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    return [{Action(Kind.BACKWARD, stage, microbatch)}, {Action(kind, stage, microbatch) for kind in split}]


def test_registered_names():
    assert tuple(SCHEDULES) == NAMES
    assert schedule("zbv").v_shaped and schedule("zbv").splits_backward and schedule("zbv").stages_per_rank == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_runs(name):
    for ranks, stages_per_rank, microbatches in iter_sizes(name):
        placement = assign_stage_ranks(name, ranks, stages_per_rank)
        computed = simulate(rank_actions(name, ranks, stages_per_rank, microbatches), placement)
        assert set(computed.values()) == {1}
        for stage in range(ranks * stages_per_rank):
            for microbatch in range(microbatches):
                forward = Action(Kind.FORWARD, stage, microbatch)
                stage_actions = {
                    action for action in computed if (action.stage, action.microbatch) == (stage, microbatch)
                }
                assert forward in stage_actions and stage_actions - {forward} in list_full_backwards(stage, microbatch)
        assert {action.stage for action in computed} == set(range(ranks * stages_per_rank))
        assert {action.microbatch for action in computed} == set(range(microbatches))
        if not schedule(name).splits_backward:
            assert all(action.kind in (Kind.FORWARD, Kind.BACKWARD) for action in computed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("one_way", "kind"), [(forward_plan, Kind.FORWARD), (backward_plan, Kind.BACKWARD)])
def test_every_one_way_plan_runs(name, one_way, kind):
    for ranks, stages_per_rank, microbatches in iter_sizes(name):
        placement = assign_stage_ranks(name, ranks, stages_per_rank)
        actions = one_way(name, ranks, stages_per_rank, microbatches)
        computed = simulate(actions, placement, forwards=False)
        expected = [
            Action(kind, stage, microbatch) for stage in range(len(placement)) for microbatch in range(microbatches)
        ]
        assert computed == Counter(expected)


def test_one_way_plans_accept_any_microbatch_count():
    for microbatches in range(1, 8):
        simulate(forward_plan("dualpipev", 4, 2, microbatches), assign_stage_ranks("dualpipev", 4, 2))
    forwards, backwards = [one("zbv", 2, 2, 3)[0] for one in (forward_plan, backward_plan)]
    order = [(action.stage, action.microbatch) for action in forwards if action.kind is Kind.FORWARD]
    assert order == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2)]
    assert [(a.stage, a.microbatch) for a in backwards if a.kind is Kind.BACKWARD] == order[::-1]


@pytest.mark.parametrize(
    "fault", ["receives swapped", "send left out", "sent too early", "forward twice", "waits for each other"]
)
def test_simulator_detects_faults(fault):
    actions = [list(order) for order in rank_actions("1f1b", 3, 1, 4)]
    placement = assign_stage_ranks("1f1b", 3, 1)

    def find_indices(rank, kind):
        return [index for index, action in enumerate(actions[rank]) if action.kind is kind]

    if fault == "receives swapped":
        first, second = find_indices(1, Kind.RECEIVE_FORWARD)[:2]
        actions[1][first], actions[1][second] = actions[1][second], actions[1][first]
    elif fault == "send left out":
        del actions[0][find_indices(0, Kind.SEND_FORWARD)[-1]]
    elif fault == "sent too early":
        actions[0].insert(0, actions[0].pop(find_indices(0, Kind.SEND_FORWARD)[0]))
    elif fault == "forward twice":
        actions[0].append(actions[0][0])
    else:
        # Rank 1 sends a gradient to rank 0 while rank 0 is still sending it an activation.
        receive, send = find_indices(1, Kind.RECEIVE_FORWARD)[-1], find_indices(1, Kind.SEND_BACKWARD)[-1]
        actions[1].append(actions[1].pop(receive))
        assert send < len(actions[1])
    if fault == "forward twice":
        assert 2 in simulate(actions, placement).values()
    else:
        with pytest.raises(AssertionError):
            simulate(actions, placement)


def test_1f1b_bounds_live_activations():
    for ranks in (2, 3, 4):
        for microbatches in range(1, 10):
            for rank, order in enumerate(rank_actions("1f1b", ranks, 1, microbatches)):
                live, peak = 0, 0
                for action in order:
                    live += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
                    peak = max(peak, live)
                assert peak == min(ranks - rank, microbatches)


def test_placement():
    assert assign_stage_ranks("1f1b", 4, 1) == (0, 1, 2, 3)
    assert assign_stage_ranks("interleaved_1f1b", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert assign_stage_ranks("zbv", 3, 2) == assign_stage_ranks("dualpipev", 3, 2) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_single_stage_bubble(name):
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 8, 16):
            expected = (ranks - 1) / (microbatches + ranks - 1)
            assert bubble(name, ranks, 1, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
def test_interleaved_bubble(name):
    for ranks in (2, 4):
        for stages_per_rank in (1, 2, 3):
            for microbatches in (ranks, 2 * ranks, 4 * ranks):
                expected = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
                assert bubble(name, ranks, stages_per_rank, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_split_backward_bubble(name):
    assert bubble(name, 4, 2, 8) == pytest.approx(1 / 17)
    assert bubble(name, 4, 2, 16) == pytest.approx(1 / 33)
    assert bubble(name, 4, 2, 8, costs=(1.0, 1.0, 0.5)) > bubble(name, 4, 2, 8)
    assert bubble(name, 4, 2, 8, costs=(3.0, 3.0, 3.0)) == pytest.approx(bubble(name, 4, 2, 8))


@pytest.mark.parametrize("name", list(TORCH_CLASSES))
def test_size_limits_match_torch(name):
    registered = schedule(name)
    for ranks in (1, 2, 3, 4, 5):
        for stages_per_rank in (1, 2, 3) if registered.fixed is None else (registered.fixed,):
            for microbatches in range(1, 24):
                if registered.runs(ranks, stages_per_rank, microbatches):
                    pipeline_orders(TORCH_CLASSES[name], ranks, stages_per_rank, microbatches)
                else:
                    with pytest.raises(ValueError):
                        pipeline_orders(TORCH_CLASSES[name], ranks, stages_per_rank, microbatches)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("none", 2, 1, 4), ["MegatronConfig.pipeline_schedule", "'none'", *NAMES]),
        (("1f1b", 0, 1, 4), ["MegatronConfig.pp_size", "0", "1 or more"]),
        (("1f1b", 2, 2, 4), ["MegatronConfig.virtual_stages", "2", "'1f1b'", "1 only"]),
        (("zbv", 2, 1, 4), ["MegatronConfig.virtual_stages", "1", "'zbv'", "2 only"]),
        (("interleaved_1f1b", 2, 0, 4), ["MegatronConfig.virtual_stages", "0", "1 or more"]),
        (("interleaved_1f1b", 4, 2, 9), ["MegatronConfig.num_microbatches", "9", "multiple of 4", "8 or 10"]),
        (("dualpipev", 3, 2, 5), ["MegatronConfig.num_microbatches", "5", "6 or more"]),
        (("gpipe", 2, 1, 0), ["MegatronConfig.num_microbatches", "0", "1 or more"]),
    ],
)
def test_impossible_sizes_are_named(sizes, words):
    for function in (check_schedule, rank_actions, bubble):
        with pytest.raises(ConfigError) as error:
            function(*sizes)
        assert all(word in str(error.value) for word in words)


def test_unset_microbatch_count():
    check_schedule("dualpipev", 4, 2)
    assert schedule("interleaved_1f1b").resolve(None) == 2 and schedule("interleaved_1f1b").resolve(3) == 3
    with pytest.raises(ConfigError, match="virtual_stages = 3"):
        schedule("dualpipev").resolve(3)


def test_largest_valid_microbatch_count():
    assert valid_microbatches("1f1b", 4, 1, 7) == 7
    assert valid_microbatches("zbv", 4, 2, 1) == 1
    assert valid_microbatches("interleaved_1f1b", 4, 2, 9) == 8
    assert valid_microbatches("interleaved_zero_bubble", 4, 2, 1023) == 1020
    assert valid_microbatches("dualpipev", 4, 2, 9) == 9
    for name in NAMES:
        for ranks, stages_per_rank, microbatches in iter_sizes(name):
            assert valid_microbatches(name, ranks, stages_per_rank, microbatches) == microbatches


def test_smallest_valid_microbatch_count():
    assert valid_microbatches("dualpipev", 4, 2, 7) == 8
    assert valid_microbatches("dualpipev", 2, 2, 1) == 4


def test_register_custom_schedule(monkeypatch):
    monkeypatch.setattr(schedules, "SCHEDULES", dict(SCHEDULES))

    def one_by_one(ranks, stages_per_rank, microbatches):
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return tuple(
            tuple(Action(kind, rank, microbatch) for microbatch in range(microbatches) for kind in kinds)
            for rank in range(ranks)
        )

    register_schedule(Schedule("one_by_one", one_by_one, fixed=1))
    simulate(rank_actions("one_by_one", 3, 1, 4), assign_stage_ranks("one_by_one", 3, 1))
    assert bubble("one_by_one", 4, 1, 8) == pytest.approx(3 / 4)
    with pytest.raises(ConfigError, match="registered already"):
        register_schedule(Schedule("1f1b", one_by_one, fixed=1))
    register_schedule(dataclasses.replace(schedule("1f1b"), orders=one_by_one), replace=True)
    assert bubble("1f1b", 4, 1, 8) == pytest.approx(3 / 4)

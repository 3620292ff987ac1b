"""Tests of the decision that ranks wait for each other in different calls."""

import pytest

from hf_megatron.core.communication.diverged_calls import BLOCKED_SECONDS, SLOW_SECONDS, describe_diverged_calls


def beat(name, *, is_blocked=True, seconds=BLOCKED_SECONDS + 1, waits_for=(0, 1, 2), line="train.py:3"):
    waited_ranks = None if waits_for is None else list(waits_for)
    return {"call": [name, line], "blocked_seconds": seconds if is_blocked else 0.0, "waited_ranks": waited_ranks}


def test_every_call_and_line_is_named():
    text = describe_diverged_calls({0: beat("generate"), 1: beat("train", line="a.py:9"), 2: beat("train")}, [])
    assert "rank 0 in generate() (train.py:3), ranks 1, 2 in train() (a.py:9). Call generate() on every rank" in text


def test_ended_rank_is_named():
    text = describe_diverged_calls({0: beat("save_pretrained"), 1: beat("exit", is_blocked=False)}, [1])
    assert "rank 0 in save_pretrained() (train.py:3), rank 1 at the end of the script" in text


@pytest.mark.parametrize(
    "beats",
    [
        {0: beat("train"), 1: beat("train")},
        {0: beat("generate"), 1: beat("train", is_blocked=False)},
        {0: beat("generate"), 1: beat("train"), 2: beat("train", is_blocked=False)},
        {0: beat("backward"), 1: beat("forward")},
        {0: beat("evaluate"), **{rank: beat("train", waits_for=(1, 2)) for rank in (1, 2)}},
        {0: beat("evaluate"), **{rank: beat("train", waits_for=None) for rank in (1, 2)}},
    ],
    ids=[
        "same call",
        "other rank computes",
        "third rank computes",
        "no collective call",
        "a group waits for its network",
        "a message may be on its way",
    ],
)
def test_ranks_that_may_continue_are_left_alone(beats):
    assert describe_diverged_calls(beats, []) is None


def test_ranks_of_one_group_end_after_a_longer_time():
    slow = {rank: beat("train", waits_for=(1, 2), seconds=SLOW_SECONDS + 1) for rank in (1, 2)}
    assert describe_diverged_calls({0: beat("evaluate", seconds=SLOW_SECONDS + 1), **slow}, []) is not None


def test_one_rank_of_each_replica_acts_alone():
    """On tp2 x dp2 no group has all of its ranks in one call."""
    beats = {rank: beat("generate", waits_for=(rank, rank + 1)) for rank in (0, 2)}
    beats |= {rank: beat("train", waits_for=(rank - 1, rank)) for rank in (1, 3)}
    assert "ranks 0, 2 in generate()" in describe_diverged_calls(beats, [])


def test_message_of_a_stuck_rank_never_arrives():
    """On tp2 x pp2, rank 3 waits for rank 1, which waits for rank 0 in another call."""
    beats = {0: beat("generate", waits_for=(0, 1)), 1: beat("train", waits_for=(0, 1))}
    beats |= {rank: beat("train", waits_for=(rank - 2,)) for rank in (2, 3)}
    assert describe_diverged_calls(beats, []) is not None

"""Tests of the decision that ranks wait for each other in different calls."""

import pytest

from hf_megatron.core.communication.diverged_calls import describe_diverged_calls


def beat(name, *, is_blocked=True, line="train.py:3"):
    return {"call": [name, line], "is_blocked": is_blocked}


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
    ],
    ids=["same call", "other rank computes", "third rank computes", "no collective call"],
)
def test_ranks_that_may_continue_are_left_alone(beats):
    assert describe_diverged_calls(beats, []) is None

"""Tests of resuming stock Trainer after SIGKILL of a rank during training or a save."""

import os
import random
import signal

import pytest
import torch
from transformers import TrainerCallback

from hf_megatron import MegatronConfig, RankError
from hf_megatron.checkpoint import transaction
from hf_megatron.checkpoint.discovery import committed, latest
from hf_megatron.core.fork_harness import run_ranks
from tests.integration.integrations.trainer import test_resume

DP2 = MegatronConfig(dp_size=2)
POINTS = ["directory", "open", "header", "tensor", "fsync", "commit", "manifest", "rename", "rename durable", "pointer"]
ON_EVERY_RANK = POINTS[1:6]
STEPS = 10


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(path, output, *, rank, step, point, **arguments):
    """Kills `rank` at an I/O point of the first save after `step`, or at the start of a later step without one."""
    me = torch.distributed.get_rank()
    original, callbacks = transaction.Transaction.__init__, []

    def kill(name):
        if name.startswith(point):
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self, target, *args, **kwargs):
        saved_step = int(str(target).rpartition("-")[2].partition(".")[0])
        on_step = kill if me == rank and point is not None and saved_step > step else None
        original(self, target, *args, **(kwargs | {"on_step": on_step}))

    transaction.Transaction.__init__ = begin
    if me == rank and point is None:
        callbacks.append(KillAt(step + 1))
    return train(path, output, callbacks=callbacks, **arguments)


def train(path, output, callbacks=(), **arguments):
    defaults = {"steps": STEPS, "dropout": 0.1, "save_steps": 1, "save_total_limit": 2, "logging_steps": 1}
    return test_resume.train(path, output, DP2, callbacks=callbacks, **(defaults | arguments))


@pytest.fixture(scope="module")
def uninterrupted(stories, tmp_path_factory):
    return run_ranks(train, 2, stories, tmp_path_factory.mktemp("whole"), save_strategy="no")[0]


def assert_same_run(found, expected):
    assert found[0][-1] == expected[0][-1], "loss and gradient norm of the last step"
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


@pytest.mark.parametrize("point", POINTS)
def test_kill_during_save_loses_only_that_save(stories, tmp_path, uninterrupted, point):
    rank = 1 if point in ON_EVERY_RANK else 0
    with pytest.raises(RankError, match=f"rank {rank} died"):
        run_ranks(train_until_killed, 2, stories, tmp_path, rank=rank, step=7, point=point)
    # Checkpoint 8 is either complete or missing; checkpoint 7 exists in any case.
    assert latest(tmp_path).name in ("checkpoint-7", "checkpoint-8")
    assert_same_run(run_ranks(train, 2, stories, tmp_path, resume=True)[0], uninterrupted)
    assert not list(tmp_path.glob(".tmp-*")), "what the killed save left is gone after the next one"


def test_twenty_kills_match_uninterrupted_run(stories, tmp_path, uninterrupted):
    chance = random.Random(0)
    for kill in range(20):
        done = committed(tmp_path)
        step = int(done[0].name.partition("-")[2].partition(".")[0]) if done else 0
        # Half of the kills hit training and half a save; a run without progress is started again.
        point = chance.choice(POINTS) if chance.random() < 0.5 or not done or step >= STEPS - 2 else None
        rank = chance.randrange(2) if point is None or point in ON_EVERY_RANK else 0
        with pytest.raises(RankError):
            run_ranks(
                train_until_killed,
                2,
                stories,
                tmp_path,
                rank=rank,
                step=min(step, STEPS - 2),
                point=point,
                resume=True if done else None,
            )
        assert kill < 2 or committed(tmp_path), "a checkpoint was lost"
    assert_same_run(run_ranks(train, 2, stories, tmp_path, resume=True)[0], uninterrupted)

"""Tests of the fork harness: result order, tracebacks of all ranks, and stuck ranks."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from hf_megatron import RankError, UnsupportedError
from hf_megatron.core import fork_harness
from hf_megatron.core.fork_harness import first_reason, run_ranks
from hf_megatron.testing.parity import make_tiny_model


def test_results_come_in_rank_order():
    assert run_ranks(lambda factor: dist.get_rank() * factor, 4, 10) == [0, 10, 20, 30]


def test_all_tracebacks_are_shown():
    def fail():
        raise ValueError(f"broken on {dist.get_rank()}")

    with pytest.raises(RankError) as error:
        run_ranks(fail, 2)
    assert "broken on 0" in str(error.value) and "broken on 1" in str(error.value)


@pytest.mark.parametrize("kind", [UnsupportedError, ValueError])
def test_first_reason_prefers_library_errors(kind):
    """A rank whose peer failed reports only a closed connection."""

    def fail():
        if dist.get_rank() == 1:
            raise kind("no such layout")
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RankError) as error:
        run_ranks(fail, 2)
    assert first_reason(str(error.value)) == f"{kind.__name__}: no such layout"


def test_stuck_rank_is_killed_and_named():
    def stick():
        if dist.get_rank() == 1:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was stuck"):
        run_ranks(stick, 2, timeout=2)
    assert time.monotonic() - start < 30


def test_failed_rank_ends_waiting_ranks_before_timeout(monkeypatch):
    monkeypatch.setattr(fork_harness, "_GRACE_SECONDS", 1.0)

    def fail_on_one():
        if dist.get_rank() == 1:
            raise ValueError("gone")
        time.sleep(100)

    with pytest.raises(RankError, match="gone"):
        run_ranks(fail_on_one, 2, timeout=90)


def test_unpicklable_result_raises():
    with pytest.raises(RankError, match="cannot be pickled"):
        run_ranks(lambda: lambda: 0, 1)


def test_tiny_model_is_measured_in_a_fork(monkeypatch):
    """A backward starts torch's device threads, after which no fork of this process could run one."""
    process, backward = os.getpid(), torch.Tensor.backward

    def assert_in_fork(*args, **kwargs):
        assert os.getpid() != process
        return backward(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", assert_in_fork)
    tiny_model = make_tiny_model(LlamaConfig(), microbatches=1)
    assert tiny_model.reference.gradients and tiny_model.reference.norm > 0
    tiny_model.delete()

"""Tests of parameters that only some data parallel ranks use: a branch depends on the samples of the batch."""

from contextlib import nullcontext

import pytest
import torch

from hf_megatron import shard_safe
from hf_megatron.parallelize import parallel_state
from tests.helpers.training import PatternRuns, shard_batch


def backward(loop, seed):
    """Runs a backward in which the last layer's MLP is used for the first two samples only."""
    sample_mask = shard_batch(loop.model, {"seen": torch.tensor([1.0, 1.0, 0.0, 0.0])})["seen"]
    mlp = loop.model.model.layers[1].mlp
    stock_forward = type(mlp).forward
    mlp.forward = shard_safe(
        lambda x: stock_forward(mlp, x) * sample_mask[:, None, None] if sample_mask.any() else x * 0
    )
    try:
        loss = loop.loss(seed)
    finally:
        del mlp.forward
    loss.backward()
    loop.losses.append(loss.item())


def step(loop):
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def step_with_unused_mlp(loop):
    for seed in range(3):
        backward(loop, seed)
        step(loop)


def clear_gradient(loop):
    for seed in range(3):
        backward(loop, seed)
        loop.model.model.layers[1].mlp.up_proj.weight.grad = None
        step(loop)


def clear_and_clip_gradients(loop):
    for seed in range(3):
        backward(loop, seed)
        for parameter in loop.model.model.layers[1].mlp.parameters():
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        step(loop)


def read_gradients(loop):
    for seed in range(2):
        backward(loop, seed)
        loop.see(f"empty {seed}", torch.tensor([float(p.grad is None) for p in loop.model.parameters()]))
        step(loop)


def accumulate_gradients(loop):
    with nullcontext() if parallel_state(loop.model) is None else loop.model.no_sync():
        backward(loop, 0)
    backward(loop, 1)
    loop.model.model.layers[1].mlp.up_proj.weight.grad = None
    step(loop)


LOOP_PATTERNS = {
    function.__name__: function
    for function in (
        step_with_unused_mlp,
        clear_gradient,
        clear_and_clip_gradients,
        read_gradients,
        accumulate_gradients,
    )
}


@pytest.fixture(scope="module")
def runs(tiny):
    return PatternRuns(tiny, LOOP_PATTERNS)


@pytest.mark.parametrize("loop_pattern", LOOP_PATTERNS)
@pytest.mark.parametrize("text", ["dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "tp2+dp2", "tp2+dp2+zero3"])
def test_matches_single_process(runs, text, loop_pattern):
    runs.compare(text, loop_pattern)

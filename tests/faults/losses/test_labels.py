"""Tests of fully ignored labels, on one dp rank and in the global batch."""

import math

import pytest
import torch

from hf_megatron import prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import (
    clone_parameters,
    count_ranks,
    load_model,
    make_batch,
    measure_error,
    parameters_unchanged,
    parse_layout,
    shard_batch,
)

LAYOUTS = ["dp2", "dp2+zero0", "tp2+dp2+zero2", "tp2+sp+dp2", "dp2+zero3"]


def make_ignored_batch(rank, ranks=2):
    """Returns a batch whose samples have no label on dp rank `rank`, or on all ranks with `None`."""
    full_batch = make_batch(0)
    labels = full_batch["labels"].clone()
    for index, samples in enumerate(labels.tensor_split(ranks)):
        if rank in (index, None):
            samples.fill_(-100)
    return full_batch | {"labels": labels}


def compute_local_norms(model):
    """Returns the norms of the local gradients as the optimizer receives them."""
    reducer = parallel_state(model).data_parallel.reducer
    if reducer is None:
        return [p.grad.to_local().norm().item() for p in model.parameters() if p.grad is not None]
    reducer.finish()
    return [reducer.gradient(p).norm().item() for p in model.parameters()]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_fault_23_all_labels_ignored_on_one_dp_rank(stories, text, rank):
    expected = load_model(stories)(**make_ignored_batch(rank)).loss.item()

    def run(model, lr=0.1):
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=lr))
        loss = model(**shard_batch(model, make_ignored_batch(rank))).loss
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        loss.backward()
        optimizer.step()

    assert measure_error(stories, run, parse_layout(text)) < 1e-4


@pytest.mark.parametrize("text", LAYOUTS)
def test_fault_23_all_labels_ignored_in_global_batch(stories, text):
    """The mean over zero labels is NaN and has no gradients, as in a single process."""

    def on_rank():
        model = load_model(stories, parse_layout(text))
        before = clone_parameters(model)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(**shard_batch(model, make_ignored_batch(None))).loss
        loss.backward()
        norms = compute_local_norms(model)
        optimizer.step()
        skipped = parallel_state(model).data_parallel.step_status.skipped_steps
        return math.isnan(loss.item()), max(norms), parameters_unchanged(model, before), skipped

    assert run_ranks(on_rank, count_ranks(parse_layout(text))) == [(True, 0.0, True, 0)] * count_ranks(
        parse_layout(text)
    )


def test_per_rank_mean_is_detected(stories):
    """Seeded fault: a rank without labels divides by zero."""
    from hf_megatron.losses.batch_loss import BatchLoss

    def sabotage():
        BatchLoss._mean = lambda self, total, terms, at_least=0: total / terms

    def run(model):
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(**shard_batch(model, make_ignored_batch(1))).loss.backward()
        optimizer.step()

    assert not measure_error(stories, run, parse_layout("dp2"), sabotage) < 1e-2

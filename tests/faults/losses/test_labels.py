"""Labels that are all ignored: on one dp rank, and in a whole batch."""

import math

import pytest
import torch

from hf_megatron import prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import batch, error_of, layout, load, local_samples, ranks_of, snapshot, unmoved

LAYOUTS = ["dp2", "dp2+zero0", "tp2+dp2+zero2", "tp2+sp+dp2", "dp2+zero3"]


def ignored(rank, ranks=2):
    """A batch in which the rows of one dp rank have no label; of every rank with `None`."""
    full_batch = batch(0)
    labels = full_batch["labels"].clone()
    for index, rows in enumerate(labels.tensor_split(ranks)):
        if rank in (index, None):
            rows.fill_(-100)
    return full_batch | {"labels": labels}


def local_norms(model):
    """Norms of this rank's gradients, as the optimizer gets them."""
    reducer = parallel_state(model).data_parallel.reducer
    if reducer is None:
        return [p.grad.to_local().norm().item() for p in model.parameters() if p.grad is not None]
    reducer.finish()
    return [reducer.gradient(p).norm().item() for p in model.parameters()]


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_fault_23_all_labels_ignored_on_one_dp_rank(stories, text, rank):
    expected = load(stories)(**ignored(rank)).loss.item()

    def run(model, lr=0.1):
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=lr))
        loss = model(**local_samples(model, ignored(rank))).loss
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        loss.backward()
        optimizer.step()

    assert error_of(stories, run, layout(text)) < 1e-4


@pytest.mark.parametrize("text", LAYOUTS)
def test_fault_23_all_labels_of_the_global_batch_ignored(stories, text):
    """The mean of nothing is no number and has no gradients, as in one process."""

    def on_rank():
        model = load(stories, layout(text))
        before = snapshot(model)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(**local_samples(model, ignored(None))).loss
        loss.backward()
        norms = local_norms(model)
        optimizer.step()
        skipped = parallel_state(model).data_parallel.step_status.skipped_steps
        return math.isnan(loss.item()), max(norms), unmoved(model, before), skipped

    assert run_ranks(on_rank, ranks_of(layout(text))) == [(True, 0.0, True, 0)] * ranks_of(layout(text))


def test_each_ranks_own_mean_is_found(stories):
    """The seeded fault: a rank without a label has no mean."""
    from hf_megatron.losses.batch_loss import BatchLoss

    def sabotage():
        BatchLoss._mean = lambda self, total, terms, at_least=0: total / terms

    def run(model):
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(**local_samples(model, ignored(1))).loss.backward()
        optimizer.step()

    assert not error_of(stories, run, layout("dp2"), sabotage) < 1e-2

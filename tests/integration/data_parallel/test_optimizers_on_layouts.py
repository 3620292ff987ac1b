"""Tests of every cell of the table of optimizers and layouts in docs/data_parallel.md (`tests.helpers.optimizers`)."""

import functools

import pytest
import torch

from hf_megatron import CheckpointError, UnsupportedError, prepare_optimizer
from hf_megatron.checkpoint.reader import Checkpoint, open_checkpoint
from hf_megatron.checkpoint.training_state import load_model, load_optimizers
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import clone_parameters, count_ranks, parse_layout, restore_parameters, shard_batch
from tests.helpers.optimizers import LAYOUTS, LIMIT, ROWS
from tests.helpers.training import make_batch, save_tiny
from tests.integration.data_parallel.test_layer_wise import compare, gather_results, load, read_start, save
from tests.integration.integrations.trainer.test_resume import read_full_tensors

TRAINED = [name for name, row in ROWS.items() if row.raises is None]
RESUMED = [name for name in TRAINED if ROWS[name].unsaved is None]
# Below the norm of the gradients, so that every step is clipped.
CLIPPED_NORM = 0.3


def prepare(name, model):
    return [prepare_optimizer(optimizer, layer_wise=ROWS[name].layer_wise) for optimizer in ROWS[name].make(model)]


def switch(optimizers, mode):
    for optimizer in optimizers:
        if hasattr(optimizer, mode):
            getattr(optimizer, mode)()


def train(model, optimizers, steps=3, first=0):
    """Returns losses and gradient norms of clipped steps; schedule-free weights are left at the average."""
    measured = []
    switch(optimizers, "train")
    for step in range(first, first + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(**shard_batch(model, make_batch(step))).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM)
        assert norm > CLIPPED_NORM
        measured += [loss.item(), norm.item()]
        # Without compilation: torchao's updates would be compiled for every shape.
        with torch.compiler.set_stance("force_eager"):
            for optimizer in optimizers:
                optimizer.step()
    switch(optimizers, "eval")
    return measured


def train_with_each(path, text):
    model = load(path, text)
    start, results = clone_parameters(model), {}
    for name in TRAINED:
        restore_parameters(model, start)
        results[name] = gather_results(model, train(model, prepare(name, model)))
    return results


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """Folder of a Llama with matrices that are large enough for torchao's 8-bit states."""
    folder = tmp_path_factory.mktemp("dense")
    save_tiny(folder, hidden_size=64, intermediate_size=96)
    return folder


@pytest.fixture
def folder(dense, request):
    experts = "ep" in request.node.callspec.params.get("layout", "")
    return request.getfixturevalue("tiny_experts") if experts else dense


@pytest.fixture(scope="module")
def by_layout():
    @functools.cache
    def run(path, text):
        if text is None:
            return train_with_each(path, None)
        return run_ranks(train_with_each, count_ranks(parse_layout(text)), path, text, timeout=290)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_match_single_process(folder, by_layout, name, layout):
    results = [rank_results[name] for rank_results in by_layout(folder, LAYOUTS[layout])]
    compare(results, by_layout(folder, None)[name], read_start(folder), ROWS[name].limit)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.raises is not None])
def test_unsupported_optimizers_raise(folder, name, layout):
    """With the cure of the error: an optimizer without a closure."""
    model = load(folder, None)
    expected = train(model, prepare("AdamW", model), 2)

    def on_rank():
        model = load(folder, LAYOUTS[layout])
        for optimizer in ROWS[name].make(model):
            with pytest.raises(UnsupportedError, match=ROWS[name].raises):
                prepare_optimizer(optimizer)
            with pytest.raises(UnsupportedError, match=ROWS[name].raises):
                optimizer.step(lambda: model(**shard_batch(model, make_batch(0))).loss)
        assert train(model, prepare("AdamW", model), 2) == pytest.approx(expected, rel=LIMIT)

    run_ranks(on_rank, count_ranks(parse_layout(LAYOUTS[layout])))


CHAINS = {
    "dense": [None, *(text for text in LAYOUTS.values() if "ep" not in text), None],
    "experts": [None, LAYOUTS["ep2"], "tp2+ep2", LAYOUTS["ep2"], None],
}


def train_link(model, optimizers, index):
    """Takes two steps on a chain's first layout, because SOAP's first one only initializes, and one on the others."""
    return train(model, optimizers, 1, first=index + 1) if index else train(model, optimizers, 2)


def continue_each(path, text, index, folder):
    """Resumes every optimizer from the previous layout, trains, and saves; returns the results."""
    results = {}
    for name in RESUMED:
        model = load(path, text)
        optimizers = prepare(name, model)
        if index:
            checkpoint = open_checkpoint(folder / f"{name} {index - 1}")
            load_model(model, checkpoint)
            load_optimizers(model, optimizers, checkpoint)
            save(model, optimizers, folder / f"{name} {index - 1} again")
        results[name] = gather_results(model, train_link(model, optimizers, index))
        save(model, optimizers, folder / f"{name} {index}")
    return results


@pytest.fixture(scope="module")
def resumed(dense, tiny_experts, tmp_path_factory):
    """Runs of a step or two on each layout of a chain, by the chain: the results of each link, and the checkpoints."""

    @functools.cache
    def run(chain):
        folder = tmp_path_factory.mktemp("chain")
        path = {"dense": dense, "experts": tiny_experts}[chain]
        links = []
        for index, text in enumerate(CHAINS[chain]):
            ranks = 1 if text is None else count_ranks(parse_layout(text))
            links.append(run_ranks(continue_each, ranks, path, text, index, folder, timeout=290))
        return path, links, folder

    return run


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", RESUMED)
def test_state_resumes_on_other_layouts(resumed, name, chain):
    """A run across all layouts equals the uninterrupted one; a checkpoint that was only moved is unchanged."""
    path, links, folder = resumed(chain)
    model = load(path, None)
    optimizers = prepare(name, model)
    for index, text in enumerate(CHAINS[chain]):
        expected = gather_results(model, train_link(model, optimizers, index))
        compare([results[name] for results in links[index]], expected, read_start(path), ROWS[name].limit)
        if index:
            ends = "", " again"
            unchanged, moved = (read_full_tensors(folder / f"{name} {index - 1}{end}") for end in ends)
            assert moved.keys() == unchanged.keys()
            assert all(torch.equal(moved[key], unchanged[key]) for key in moved), text
            saved, reread = (Checkpoint(folder / f"{name} {index - 1}{end}").metadata["optimizers"] for end in ends)
            assert [optimizer["scalars"] for optimizer in saved] == [optimizer["scalars"] for optimizer in reread]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.unsaved])
def test_state_that_does_not_resume_is_not_saved(dense, tmp_path, name):
    def on_rank():
        model = load(dense, "tp2")
        optimizers = prepare(name, model)
        train(model, optimizers, 1)
        with pytest.raises(CheckpointError, match=ROWS[name].unsaved):
            save(model, optimizers, tmp_path / "state")

    run_ranks(on_rank, 2)

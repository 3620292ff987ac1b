"""Tests of the comparison of outputs over the ranks in the first training calls."""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import output_checks
from hf_megatron.errors import RankError
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import (
    clone_parameters,
    count_ranks,
    load_model,
    make_batch,
    parameters_unchanged,
    parse_layout,
    shard_batch,
)


class WithZLoss(LlamaForCausalLM):
    """Adds a term over the tokens of this rank to the loss."""

    coefficient = 1e-3

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if labels is not None:
            logits = outputs.logits[:, :-1][torch.as_tensor(labels)[:, 1:] != -100]
            outputs.loss = outputs.loss + self.coefficient * logits.logsumexp(-1).pow(2).mean()
        return outputs


class WithPenalty(LlamaForCausalLM):
    """Adds a term that is equal on all ranks to the loss, and scales it."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = 2 * (outputs.loss + 1e-2 * self.lm_head.weight.pow(2).mean())
        return outputs


def _count_targets(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def _step(model, optimizer, arguments, ranks=1):
    (model(**arguments).loss * ranks).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_partly_known(path, layout, cls, count):
    model = cls.from_pretrained(path, megatron_config=parse_layout(layout)).train()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = make_batch(0)
    arguments = shard_batch(model, batch) | ({"num_items_in_batch": _count_targets(batch)} if count else {})
    before = clone_parameters(model)
    with pytest.raises(UnsupportedError, match="covers the samples of one data-parallel rank only"):
        _step(model, optimizer, arguments)
    return parameters_unchanged(model, before)


@pytest.mark.parametrize("count", [False, True], ids=["mean", "count"])
@pytest.mark.parametrize("layout", ["dp2", "dp2+zero0", "dp2+zero3"])
def test_partly_known_loss_raises_on_every_rank(stories, layout, count):
    assert all(run_ranks(_train_partly_known, 2, stories, layout, WithZLoss, count, timeout=100))


def _follow_cure(path, layout):
    """Calls the model without labels, and computes the loss from its outputs."""
    model = WithZLoss.from_pretrained(path, megatron_config=parse_layout(layout) if layout else None).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if layout:
        optimizer = prepare_optimizer(optimizer)
    losses = []
    for seed in range(3):
        batch = make_batch(seed, 4)
        local = shard_batch(model, batch)
        logits, targets = model(input_ids=local["input_ids"]).logits[:, :-1], local["labels"][:, 1:]
        kept = logits[targets != -100]
        terms = F.cross_entropy(kept, targets[targets != -100], reduction="none")
        terms = terms + WithZLoss.coefficient * kept.logsumexp(-1).pow(2)
        ranks = parallel_state(model).mesh.dp_size if layout else 1
        loss = terms.sum() / _count_targets(batch) * ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_loss_from_outputs_is_the_cure(stories):
    assert all(run_ranks(_train_partly_known, 2, stories, "dp2", WithZLoss, False, timeout=100))
    expected = _follow_cure(stories, None)
    first, second = run_ranks(_follow_cure, 2, stories, "dp2", timeout=100)
    assert [(one + other) / 2 for one, other in zip(first, second, strict=True)] == pytest.approx(expected, rel=1e-5)


def test_one_rank_is_the_cure(stories):
    model = WithZLoss.from_pretrained(stories, megatron_config=MegatronConfig(dp_size=1)).train()
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batch(0))


@pytest.mark.parametrize("count", [False, True], ids=["mean", "count"])
def test_terms_that_are_equal_on_all_ranks_pass(stories, count):
    def run(model, lr=0.1):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        is_single = parallel_state(model) is None
        optimizer = optimizer if is_single else prepare_optimizer(optimizer)
        for seed in range(4):
            batch = make_batch(seed)
            counted = {"num_items_in_batch": _count_targets(batch)} if count else {}
            ranks = 1 if is_single or not count else 2
            _step(model, optimizer, shard_batch(model, batch) | counted, ranks)

    def run_ranks_of(path, config):
        model = WithPenalty.from_pretrained(path, megatron_config=config).train()
        run(model)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = run_ranks_of(stories, None)
    for weights in run_ranks(run_ranks_of, 2, stories, parse_layout("dp2"), timeout=100):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


def _weighted_loss(model, arguments, factor):
    logits = model(input_ids=arguments["input_ids"]).logits
    targets = arguments["labels"][:, 1:].reshape(-1)
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none")
    # The loss itself stays the same for other weights if the model is untrained; its gradient does not.
    return (losses * torch.linspace(1, factor, len(losses))).mean()


def _differ_on_one_rank(path, layout, rank):
    config = parse_layout(layout)
    model = load_model(path, config)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = clone_parameters(model)
    differs = torch.distributed.get_rank() == rank
    with pytest.raises(
        ConfigError, match=r"the gradient of outputs\.logits differs between the \w+ ranks of a replica"
    ):
        _weighted_loss(model, shard_batch(model, make_batch(0, 4)), 2.0 if differs else 1.0).backward()
        optimizer.step()
    assert parameters_unchanged(model, before)
    # The cure: every rank computes one loss from full outputs.
    optimizer.zero_grad()
    _weighted_loss(model, shard_batch(model, make_batch(0, 4)), 2.0).backward()
    optimizer.step()
    return not parameters_unchanged(model, before)


@pytest.mark.parametrize(("layout", "rank"), [("tp2", 1), ("cp2", 0), ("pp2", 1), ("tp2+dp2", 3), ("dp2+pp2", 0)])
def test_another_gradient_on_a_rank_of_a_replica_raises_on_every_rank(stories, layout, rank):
    assert all(run_ranks(_differ_on_one_rank, count_ranks(parse_layout(layout)), stories, layout, rank, timeout=150))


def _own_function_of_rank(path, factor):
    model = load_model(path, parse_layout("tp2"))
    rank = torch.distributed.get_rank()

    def loss_function(logits, labels, vocab_size, **kwargs):
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss * factor if rank else loss

    model.loss_function = loss_function
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), make_batch(0))


def test_another_loss_on_a_rank_of_a_replica_raises(stories):
    run_ranks(_own_function_of_rank, 2, stories, 1.0, timeout=100)

    def raises(path):
        with pytest.raises(ConfigError, match=r"outputs\.loss differs between the tp ranks"):
            _own_function_of_rank(path, 1.01)

    run_ranks(raises, 2, stories, timeout=100)


def _count_messages(path, layout):
    """Returns the messages of each step, and whether a difference from the fourth call on is still noticed."""
    sent, original = [0], output_checks.gather

    def count(*args, **kwargs):
        sent[-1] += 1
        return original(*args, **kwargs)

    output_checks.gather = count
    model = load_model(path, parse_layout(layout))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        _step(model, optimizer, shard_batch(model, make_batch(0)))
        sent.append(0)
    return sent[:5], parallel_state(model).placed[output_checks.NAME].records


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_first_three_calls_send_one_message_each(stories, layout):
    for sent, records in run_ranks(_count_messages, 2, stories, layout, timeout=100):
        assert sent == [1, 1, 1, 0, 0]
        assert records == []


def _make_unequal_numbers_of_calls(path, layout):
    """Calls the model once more on the second rank, before the backward that reduces the gradients."""
    model = load_model(path, parse_layout(layout))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    rank = torch.distributed.get_rank()
    batch = shard_batch(model, make_batch(0, 4))
    for _ in range(4):
        for call in range(rank, 3):
            with model.no_sync() if call < 2 else contextlib.nullcontext():
                model(**batch, num_items_in_batch=torch.tensor(100.0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["dp2+zero0", "dp2"])
def test_unequal_numbers_of_calls_pass(stories, layout):
    first, second = run_ranks(_make_unequal_numbers_of_calls, 2, stories, layout, timeout=100)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name


def _make_several_backwards(path, layout):
    """Backpropagates two terms one after the other on one rank, and their sum on the others."""
    model = load_model(path, parse_layout(layout))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = make_batch(0, 4)
    for _ in range(2):
        loss = _weighted_loss(model, batch, 1.0)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_several_backwards_of_one_call_pass(stories, layout):
    run_ranks(_make_several_backwards, 2, stories, layout, timeout=100)


def _train_only_the_last_norm(path):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("pp2"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _step(model.train(), torch.optim.SGD(trained, lr=0.1), make_batch(0, 4))


def test_stage_without_trained_parameters_takes_part(stories):
    run_ranks(_train_only_the_last_norm, 2, stories, timeout=100)


def _train_checkpointed(path, layout):
    model = load_model(path, parse_layout(layout) if layout else None)
    model.gradient_checkpointing_enable()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for seed in range(4):
        loss = model(**shard_batch(model, make_batch(seed, 4))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "cp2", "tp2+dp2"])
def test_checkpointed_steps_match_single_process(stories, layout):
    expected = _train_checkpointed(stories, None)
    for losses in run_ranks(_train_checkpointed, count_ranks(parse_layout(layout)), stories, layout, timeout=100):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "function", "arguments"),
    [
        ("_require_global_loss", _train_partly_known, ("dp2", WithZLoss, False)),
        ("_require_same", _differ_on_one_rank, ("tp2", 1)),
    ],
)
def test_ranks_without_the_comparison_are_noticed(stories, monkeypatch, method, function, arguments):
    monkeypatch.setattr(output_checks.OutputComparison, method, lambda *args: None)
    with pytest.raises(RankError, match="DID NOT RAISE"):
        run_ranks(function, 2, stories, *arguments, timeout=100)


def _train_on_loader(path, is_prepared):
    model = load_model(path, MegatronConfig(dp_size=2)).train()
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(
        [{name: row[0] for name, row in make_batch(seed, 1).items()} for seed in range(8)], batch_size=2
    )
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = accelerator.prepare(loader) if is_prepared else loader
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(model, optimizer, next(iter(batches)))
    return any("on the same batch" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_one_batch_on_all_data_parallel_ranks_warns(stories, is_prepared):
    assert run_ranks(_train_on_loader, 2, stories, is_prepared) == [not is_prepared, False]

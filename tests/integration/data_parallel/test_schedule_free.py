"""Tests of schedule-free optimizers, whose `train` and `eval` move the parameters between two points."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_megatron import local_named_parameters, prepare_optimizer
from hf_megatron.checkpoint.reader import open_checkpoint
from hf_megatron.checkpoint.training_state import load_model, load_optimizers
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import distributed_optimizer
from hf_megatron.data_parallel.main_params import MainParam
from tests.helpers.dp_training import (
    clone_parameters,
    count_ranks,
    measure_movement_error,
    parse_layout,
    restore_parameters,
    shard_batch,
)
from tests.helpers.training import gather_full_tensors, make_batch
from tests.integration.data_parallel.test_layer_wise import load, read_start, save

schedulefree = pytest.importorskip("schedulefree")

LIMIT = 2e-4
MAKERS = {
    "AdamWScheduleFree": lambda model: schedulefree.AdamWScheduleFree(
        model.parameters(), lr=1e-2, eps=1e-4, warmup_steps=2, weight_decay=0.1
    ),
    "AdamWScheduleFree foreach=False": lambda model: schedulefree.AdamWScheduleFree(
        model.parameters(), lr=1e-2, eps=1e-4, foreach=False
    ),
    # Without the first steps that move nothing.
    "RAdamScheduleFree": lambda model: schedulefree.RAdamScheduleFree(
        model.parameters(), lr=1e-2, eps=1e-4, silent_sgd_phase=False
    ),
    "SGDScheduleFree": lambda model: schedulefree.SGDScheduleFree(model.parameters(), lr=1.0, warmup_steps=2),
}


def evaluate(model):
    with torch.no_grad():
        return model.eval()(**make_batch(99)).loss.item()


def train(model, optimizer, steps=3, first=0):
    """Trains and evaluates at the averaged weights after each step; returns all losses."""
    losses = []
    for step in range(first, first + steps):
        model.train()
        optimizer.train()
        loss = model(**shard_batch(model, make_batch(step))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        losses += [loss.item(), evaluate(model)]
    return losses


def train_with_each(path, text, names=tuple(MAKERS)):
    """Returns by optimizer: losses, averaged weights, and the weights where gradients are taken."""
    model = load(path, text)
    start, results = clone_parameters(model), {}
    for name in names:
        restore_parameters(model, start)
        optimizer = prepare_optimizer(MAKERS[name](model))
        losses = train(model, optimizer)
        weights = []
        for switch in (optimizer.eval, optimizer.train):
            switch()
            weights.append(gather_full_tensors(model, dict(local_named_parameters(model))))
        results[name] = losses, *weights
    return results


@pytest.fixture(scope="module")
def by_layout(tiny):
    @functools.cache
    def run(text):
        if text is None:
            return train_with_each(tiny, None)
        return run_ranks(train_with_each, count_ranks(parse_layout(text)), tiny, text, timeout=240)

    return run


def compare(results, expected, start):
    compared = 0
    for losses, *weights in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=LIMIT, atol=0)
        for gathered, expected_weights in zip(weights, expected[1:], strict=True):
            if gathered:
                compared += 1
                assert measure_movement_error(gathered, expected_weights, start) < LIMIT
    assert compared


LAYOUTS = ["tp2", "pp2", "cp2", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3"]
LARGE_LAYOUTS = ["tp2+dp2", "tp2+dp2+zero2", "pp2+dp2", "tp2+pp2"]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", LAYOUTS + LARGE_LAYOUTS)
def test_schedule_free_optimizers(tiny, by_layout, name, text):
    compare([rank_results[name] for rank_results in by_layout(text)], by_layout(None)[name], read_start(tiny))


def keep_other_shards():
    distributed_optimizer.ShardedOptimizer.publish = lambda self, moved: None


def switch_parameters_only_in_steps():
    distributed_optimizer.ShardedOptimizer.switch = lambda self, method, *, is_training: [
        group.update(train_mode=is_training) for group in self.optimizer.param_groups
    ]


@pytest.mark.parametrize(
    "fault", [keep_other_shards, switch_parameters_only_in_steps], ids=lambda fault: fault.__name__
)
def test_faults_are_detected(tiny, by_layout, fault):
    name = "AdamWScheduleFree"

    def on_rank():
        fault()
        return train_with_each(tiny, "dp2", (name,))[name]

    _, averaged, _ = by_layout(None)[name]
    for _, weights, _ in run_ranks(on_rank, 2):
        assert measure_movement_error(weights, averaged, read_start(tiny)) > 50 * LIMIT


@pytest.mark.parametrize("text", ["tp2", "dp2", "dp2+zero3"])
def test_bf16_parameters_have_fp32_points(tiny, text):
    """The main params move between the points in fp32, so that `eval` and `train` restore them exactly."""

    def on_rank():
        config = parse_layout(text)
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config, dtype=torch.bfloat16).train()
        optimizer = prepare_optimizer(MAKERS["AdamWScheduleFree"](model))
        train(model, optimizer)
        leaves: list[MainParam] = optimizer._hf_megatron.leaves
        optimizer.train()
        before, parameters = [leaf.tensor.clone() for leaf in leaves], clone_parameters(model)
        optimizer.eval()
        moved = any(not torch.equal(leaf.tensor, value) for leaf, value in zip(leaves, before, strict=True))
        assert all(
            torch.equal(leaf.view().reshape(-1), leaf.tensor.to(leaf.view().dtype).reshape(-1)) for leaf in leaves
        )
        optimizer.train()
        for leaf, value in zip(leaves, before, strict=True):
            torch.testing.assert_close(leaf.tensor, value, rtol=0, atol=1e-5)
        return moved and parameters.keys() == clone_parameters(model).keys()

    assert run_ranks(on_rank, 2) == [True, True]


def test_skipped_steps_are_not_counted(tiny):
    def on_rank():
        model = load(tiny, "dp2")
        optimizer = prepare_optimizer(MAKERS["AdamWScheduleFree"](model))
        train(model, optimizer, 1)
        optimizer.train()
        before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        loss = model(**shard_batch(model, make_batch(1))).loss
        (loss * float("nan")).backward()
        optimizer.step()
        return before == {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}

    assert run_ranks(on_rank, 2) == [True, True]


CHAIN = [None, "tp2", "dp2", "pp2", "dp2+zero3", None]


def test_state_resumes_on_other_layouts(tiny, tmp_path):
    def step_on(text, index):
        model = load(tiny, text)
        optimizer = prepare_optimizer(MAKERS["AdamWScheduleFree"](model))
        if index:
            checkpoint = open_checkpoint(tmp_path / f"{index - 1}")
            load_model(model, checkpoint)
            load_optimizers(model, [optimizer], checkpoint)
        losses = train(model, optimizer, 1, first=index)
        save(model, [optimizer], tmp_path / str(index))
        return losses, gather_full_tensors(model, dict(local_named_parameters(model)))

    model = load(tiny, None)
    optimizer = MAKERS["AdamWScheduleFree"](model)
    for index, text in enumerate(CHAIN):
        losses = train(model, optimizer, 1, first=index)
        expected = losses, gather_full_tensors(model, dict(local_named_parameters(model)))
        results = run_ranks(step_on, 1 if text is None else count_ranks(parse_layout(text)), text, index, timeout=120)
        compare(results, expected, read_start(tiny))


def run_trainer(path, text, folder):
    """Returns the logged losses of a Trainer that evaluates between steps."""
    model = load(path, text)
    samples = [{name: value[row] for name, value in make_batch(seed).items()} for seed in range(6) for row in range(4)]
    replicas = 1 if text is None else parse_layout(text).dp_size or 1
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        optim="schedule_free_adamw",
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4 // replicas,
        per_device_eval_batch_size=4 // replicas,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:8])
    trainer.train()
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


@pytest.mark.parametrize("text", ["tp2", "dp2", "pp2"])
def test_trainer_switches_for_evaluation(tiny, tmp_path, text):
    [expected] = run_ranks(run_trainer, 1, tiny, None, tmp_path / "one")
    assert len(expected) == 10
    for losses in run_ranks(run_trainer, 2, tiny, text, tmp_path / "parallel"):
        assert losses == pytest.approx(expected, rel=1e-3)

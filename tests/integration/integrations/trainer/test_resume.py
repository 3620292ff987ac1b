"""Tests of a stock Trainer that resumes on the same or another layout, against an uninterrupted run."""

import json
import subprocess

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from typer.testing import CliRunner

from hf_megatron import CheckpointError, MegatronConfig, prepare_optimizer
from hf_megatron.checkpoint.discovery import is_committed, latest
from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.checkpoint.reader import Checkpoint, open_checkpoint
from hf_megatron.checkpoint.tensor_chunks import TensorChunk
from hf_megatron.checkpoint.training_state import load_model, load_optimizers, pieces, training_metadata
from hf_megatron.checkpoint.transaction import Transaction
from hf_megatron.cli import app
from hf_megatron.conversion import convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.integration.integrations.accelerate.test_shuffled_order import EpochSampler
from tests.integration.integrations.trainer.test_trainer import rows

LAYOUTS = {
    "tp2": MegatronConfig(tp_size=2),
    "dp2": MegatronConfig(dp_size=2),
    "tp2 x dp2": MegatronConfig(tp_size=2, sequence_parallel=True, dp_size=2, zero_stage=2),
    "dp2 zero3": MegatronConfig(dp_size=2, zero_stage=3),
    "one process": None,
    "tp4": MegatronConfig(tp_size=4),
    "dp4": MegatronConfig(dp_size=4),
    "tp2 x dp2 zero3": MegatronConfig(tp_size=2, dp_size=2, zero_stage=3),
}
SAVED = ["tp2", "dp2", "tp2 x dp2", "dp2 zero3"]


def count_ranks(config):
    return 1 if config is None else config.tp_size * (config.dp_size or 1)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def train(path, output, config, *, steps=6, stop=None, resume=None, dropout=0.0, callbacks=(), **arguments):
    """Returns the loss and gradient norm of each step, final weights, best checkpoint; 4 samples per microbatch."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config, attention_dropout=dropout)
    dp_size = 1 if config is None else config.dp_size or 1
    defaults = {
        "per_device_train_batch_size": 4 // dp_size,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(output), **(defaults | arguments)),
        train_dataset=rows(24, 0),
        eval_dataset=rows(8, 1),
        data_collator=default_data_collator,
        callbacks=list(callbacks),
    )
    if stop is not None:
        trainer.add_callback(StopAt(stop))
    trainer.train(resume_from_checkpoint=resume)
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    log = [(e["step"], e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    return log, {name: weight.clone() for name, weight in weights.items()}, trainer.state.best_model_checkpoint


@pytest.fixture(scope="module")
def uninterrupted(stories, tmp_path_factory):
    [result] = run_ranks(train, 1, stories, tmp_path_factory.mktemp("one"), None, save_strategy="no")
    return result


@pytest.mark.parametrize(
    ("saved", "loaded"), [("tp2 x dp2", "one process"), ("dp2", "tp2 x dp2 zero3"), ("dp2 zero3", "tp4")]
)
def test_trainer_resumes_on_another_layout(stories, tmp_path, uninterrupted, saved, loaded):
    run_ranks(train, count_ranks(LAYOUTS[saved]), stories, tmp_path, LAYOUTS[saved], stop=4)
    log, weights, _ = run_ranks(train, count_ranks(LAYOUTS[loaded]), stories, tmp_path, LAYOUTS[loaded], resume=True)[0]
    for (step, loss, norm), (expected_step, expected_loss, expected_norm) in zip(
        log[-2:], uninterrupted[0][-2:], strict=True
    ):
        assert step == expected_step
        assert (loss, norm) == pytest.approx((expected_loss, expected_norm), rel=1e-5)
    for name, weight in uninterrupted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-4)


def train_in_epoch_order(*args, **kwargs):
    """Trains on samples whose order the sampler derives from the epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_get_train_sampler", lambda self, *_: EpochSampler(range(24)))
        return train(*args, **kwargs)


@pytest.mark.parametrize("name", ["dp2", "dp2 zero3"])
def test_resume_within_an_epoch_continues_its_order(stories, tmp_path, name):
    """An epoch has three steps; the run is interrupted after the first one of the second epoch."""
    [(expected, _, _)] = run_ranks(train_in_epoch_order, 1, stories, tmp_path / "one", None, save_strategy="no")
    options = {"steps": 6, "save_steps": 4}
    run_ranks(train_in_epoch_order, 2, stories, tmp_path / "two", LAYOUTS[name], stop=4, **options)
    resumed = run_ranks(train_in_epoch_order, 2, stories, tmp_path / "two", LAYOUTS[name], resume=True, **options)
    for log, _, _ in resumed:
        assert [step for step, _, _ in log[-2:]] == [5, 6]
        for values, expected_values in zip(log[-2:], expected[-2:], strict=True):
            assert values == pytest.approx(expected_values, rel=2e-5)


@pytest.mark.parametrize(("saved", "loaded"), [("tp2", "dp2"), ("dp2", "tp2")])
def test_order_by_length_continues_with_another_number_of_replicas(stories, tmp_path, saved, loaded):
    """The order of the second epoch is drawn from the random states after the resume."""
    options = {"train_sampling_strategy": "group_by_length", "save_steps": 2}
    [(expected, _, _)] = run_ranks(train, 1, stories, tmp_path / "one", None, **options)
    run_ranks(train, 2, stories, tmp_path / "two", LAYOUTS[saved], stop=2, **options)
    for log, _, _ in run_ranks(train, 2, stories, tmp_path / "two", LAYOUTS[loaded], resume=True, **options):
        for values, expected_values in zip(log[2:], expected[2:], strict=True):
            assert values == pytest.approx(expected_values, rel=2e-5)


def test_trainer_resumes_from_a_converted_checkpoint(stories, tmp_path, uninterrupted):
    """Converts through the Megatron-Core format, which stores neither scheduler nor groups; the script sets them."""
    run_ranks(train, 2, stories, tmp_path / "run", LAYOUTS["tp2"], stop=4)
    convert(tmp_path / "run" / "checkpoint-4", tmp_path / "core", "megatron_core")
    folder = tmp_path / "again" / "checkpoint-4"
    convert(tmp_path / "core", folder, "sharded")
    log, weights, _ = run_ranks(train, 2, stories, tmp_path / "other", LAYOUTS["dp2"], resume=str(folder))[0]
    assert [entry[0] for entry in log] == [5, 6]
    for values, expected in zip(log, uninterrupted[0][-2:], strict=True):
        assert values == pytest.approx(expected, rel=1e-5)
    for name, weight in uninterrupted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-4)


def make_batch():
    some = rows(4, 3)
    return {name: torch.stack([row[name] for row in some]) for name in ("input_ids", "labels")}


def make_model_and_optimizer(path, config, dtype):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config, dtype=dtype).train()
    return model, prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def save_after_steps(path, target, config, dtype):
    model, optimizer = make_model_and_optimizer(path, config, dtype)
    for _ in range(2):
        optimizer.zero_grad()
        model(**make_batch()).loss.backward()
        optimizer.step()
    with Transaction(target, training_metadata(model, [optimizer])) as transaction:
        transaction.write(pieces(model, [optimizer]))


def load_and_save_again(path, source, target, config, dtype):
    """Loads a checkpoint, saves it on this layout and returns the loss of the next step."""
    model, optimizer = make_model_and_optimizer(path, config, dtype)
    checkpoint = open_checkpoint(source)
    load_model(model, checkpoint)
    load_optimizers(model, [optimizer], checkpoint)
    with Transaction(target, training_metadata(model, [optimizer])) as transaction:
        transaction.write(pieces(model, [optimizer]))
    return model(**make_batch()).loss.item()


def read_full_tensors(path):
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    tensors = {}
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        out = torch.empty(torch.Size(shape).numel(), dtype=checkpoint.dtype(name))
        checkpoint.read(name, [TensorChunk((0,) * len(shape), shape)], out)
        tensors[name] = out
    return tensors


def test_half_precision_main_params_are_preserved(stories, tmp_path):
    dp2, tp2 = LAYOUTS["dp2"], LAYOUTS["tp2"]
    run_ranks(save_after_steps, 2, stories, tmp_path / "a" / "checkpoint-2", dp2, torch.bfloat16)
    paths = tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2"
    run_ranks(load_and_save_again, 2, stories, *paths, tp2, torch.bfloat16)
    before, after = map(read_full_tensors, paths)
    name = "optimizer/0/main_weight/model.embed_tokens.weight"
    assert before[name].dtype == torch.float32 and not torch.equal(before[name], before[name].bfloat16().float())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_checkpoint_folder_contents(stories, tmp_path):
    """The manifest covers every file, nothing is a pickle, older steps are pruned after the commit."""
    run_ranks(train, 2, stories, tmp_path, LAYOUTS["dp2"], save_total_limit=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    folder = tmp_path / "checkpoint-6"
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "trainer_state.json", "loop.safetensors", "random-00001.safetensors"} <= files
    card = {"README.md", "loss.png"}
    assert {name for name in files if not name.endswith((".json", ".safetensors"))} == card
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == files - card - {"manifest.json"}
    # Each rank writes its own half.
    sizes = [(folder / f"shard-{rank:05d}-of-00002.safetensors").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.1 * min(sizes)


def test_checkpoint_is_never_overwritten(stories, tmp_path):
    run_ranks(train, 2, stories, tmp_path, LAYOUTS["tp2"], steps=2)
    first = (tmp_path / "checkpoint-2" / "manifest.json").read_bytes()
    run_ranks(train, 2, stories, tmp_path, LAYOUTS["tp2"], steps=2, learning_rate=5e-3)
    assert (tmp_path / "checkpoint-2" / "manifest.json").read_bytes() == first
    assert latest(tmp_path).name == "checkpoint-2.1"


def test_resume_skips_incomplete_folder(stories, tmp_path):
    run_ranks(train, 2, stories, tmp_path, LAYOUTS["dp2"], stop=4)
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint-2"):
        assert latest(tmp_path).name == "checkpoint-2"
    log, *_ = run_ranks(train, 2, stories, tmp_path, LAYOUTS["dp2"], steps=4, resume=True)[0]
    assert [step for step, *_ in log] == [1, 2, 3, 4]


def test_run_continued_in_single_process(stories, tmp_path, uninterrupted):
    """A single process writes stock checkpoints, which parallel layouts reject before training."""

    def run_trainer(config, **kwargs):
        return run_ranks(train, count_ranks(config), stories, tmp_path, config, **kwargs)[0]

    dp2 = LAYOUTS["dp2"]
    run_trainer(dp2, stop=2)
    run_trainer(None, stop=4, resume=True)

    def resume_rejected():
        with pytest.raises(
            CheckpointError, match="plain Trainer.*Resume it in a single process, or pass .*checkpoint-2'"
        ):
            train(stories, tmp_path, dp2, resume=True, callbacks=[Untouched()])

    run_ranks(resume_rejected, 2)
    log, weights, _ = run_trainer(None, resume=True)
    assert [step for step, *_ in log] == [1, 2, 3, 4, 5, 6]
    again, *_ = run_trainer(dp2, resume=str(tmp_path / "checkpoint-2"))
    for entries in (log, again):
        assert np.allclose(entries, uninterrupted[0], rtol=1e-5)
    for name, weight in uninterrupted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-4)


class Untouched(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        raise AssertionError("has begun to train")


def test_best_model_at_end_comes_from_a_sharded_checkpoint(stories, tmp_path):
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first is the worst and stays the "best"
        "save_total_limit": 1,
    }
    [_, weights, best], _ = run_ranks(train, 2, stories, tmp_path, LAYOUTS["dp2"], **arguments)
    assert best == str(tmp_path / "checkpoint-2")
    saved = read_full_tensors(tmp_path / "checkpoint-2")
    assert all(torch.equal(saved[name], weight.flatten()) for name, weight in weights.items() if name in saved)


def test_async_saves_are_complete(stories, tmp_path):
    config = MegatronConfig(dp_size=2, async_save=True)
    run_ranks(train, 2, stories, tmp_path, config, save_total_limit=2)
    assert [is_committed(tmp_path / f"checkpoint-{step}") for step in (2, 4, 6)] == [False, True, True]
    sync = run_ranks(train, 2, stories, tmp_path / "sync", LAYOUTS["dp2"])[0]
    final = read_full_tensors(tmp_path / "checkpoint-6")
    assert all(torch.equal(final[name], weight.flatten()) for name, weight in sync[1].items() if name in final)


def test_merged_files_load_in_transformers(stories, tmp_path):
    """Merges with the command line in a single process; tied weights are written once."""
    _, weights, _ = run_ranks(train, 4, stories, tmp_path, LAYOUTS["tp2 x dp2 zero3"], steps=2)[0]
    command = ["hf-megatron", "merge", str(tmp_path / "checkpoint-2"), str(tmp_path / "merged")]
    subprocess.run(command, check=True)
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "README.md",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "loss.png",
        "model.safetensors",
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(model) is LlamaForCausalLM
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items() if name in weights)
    again = CliRunner().invoke(app, command[1:])
    assert again.exit_code == 1 and "exists" in again.stderr


def test_checkpoint_from_another_model_is_rejected(stories, tmp_path):
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=512)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    run_ranks(train, 2, stories, tmp_path / "out", LAYOUTS["dp2"], stop=2)

    def resume():
        with pytest.raises(CheckpointError, match="not a checkpoint of this LlamaForCausalLM: missing"):
            train(tmp_path / "other", tmp_path / "out", LAYOUTS["dp2"], resume=True)

    run_ranks(resume, 2)

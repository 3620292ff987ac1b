"""A stock Trainer that is stopped and resumed, on the same layout and on others, against one that never stopped."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_megatron import MegatronConfig
from hf_megatron.checkpoint.merged import full_state_dict
from hf_megatron.checkpoint.reader import Checkpoint, is_committed, latest
from hf_megatron.parallelize import parallel_state
from hf_megatron.verify.ranks import run_ranks

from .test_trainer import rows

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


def ranks_of(config):
    return 1 if config is None else config.tp_size * (config.dp_size or 1)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def train(path, output, config, *, steps=6, stop=None, resume=None, dropout=0.0, **arguments):
    """Losses and gradient norms of each step, and the weights at the end; global batches of four rows."""
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
    )
    if stop is not None:
        trainer.add_callback(StopAt(stop))
    trainer.train(resume_from_checkpoint=resume)
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    log = [(e["step"], e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    return log, {name: weight.clone() for name, weight in weights.items()}, trainer.state.best_model_checkpoint


@pytest.mark.parametrize("name", SAVED)
def test_resume_on_the_same_layout_is_bit_equal(stories, tmp_path, name):
    """Dropout on: random states, scheduler, moments and the data position all have to continue."""
    config = LAYOUTS[name]
    ranks = ranks_of(config)
    whole = run_ranks(train, ranks, stories, tmp_path / "whole", config, dropout=0.1, save_strategy="no")
    run_ranks(train, ranks, stories, tmp_path / "parts", config, dropout=0.1, stop=4)
    assert latest(tmp_path / "parts").name == "checkpoint-4"
    resumed = run_ranks(train, ranks, stories, tmp_path / "parts", config, dropout=0.1, resume=True)
    for (log, weights, _), (expected_log, expected, _) in zip(resumed, whole, strict=True):
        assert log[-2:] == expected_log[-2:]
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.fixture(scope="module")
def uninterrupted(stories, tmp_path_factory):
    [result] = run_ranks(train, 1, stories, tmp_path_factory.mktemp("one"), None, save_strategy="no")
    return result


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("loaded", ["one process", "tp4", "dp4", "tp2", "tp2 x dp2 zero3"])
def test_fault_14_resume_on_another_layout(stories, tmp_path, uninterrupted, saved, loaded):
    run_ranks(train, ranks_of(LAYOUTS[saved]), stories, tmp_path, LAYOUTS[saved], stop=4)
    log, weights, _ = run_ranks(train, ranks_of(LAYOUTS[loaded]), stories, tmp_path, LAYOUTS[loaded], resume=True)[0]
    for (step, loss, norm), (expected_step, expected_loss, expected_norm) in zip(
        log[-2:], uninterrupted[0][-2:], strict=True
    ):
        assert step == expected_step
        assert (loss, norm) == pytest.approx((expected_loss, expected_norm), rel=1e-5)
    for name, weight in uninterrupted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-4)

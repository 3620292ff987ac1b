"""Tests that follow the cures of errors in Trainer and its callbacks."""

import pytest
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_megatron import ConfigError, MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.trainer.callbacks.replicas import ReplicaCallback
from hf_megatron.integrations.trainer.callbacks.run import RunCallback
from hf_megatron.integrations.trainer.callbacks.timeline import TimelineCallback
from tests.helpers.dp_training import load_model
from tests.integration.integrations.trainer.test_trainer import rows

DP2, PP2 = MegatronConfig(dp_size=2), MegatronConfig(pp_size=2, num_microbatches=2)


def make_trainer(path, output, config, callbacks=(), ranks=1):
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=4 // ranks, max_steps=2, logging_steps=1, learning_rate=1e-3,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = {"train_dataset": rows(8, 0), "data_collator": default_data_collator}
    return Trainer(load_model(path, config), arguments, callbacks=list(callbacks), **data)


def train(trainer):
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


CALLBACKS = {
    "replicas": (
        lambda folder: ReplicaCallback(1),
        DP2,
        "Load the model with megatron_config=, or remove the callback",
    ),
    "run": (
        lambda folder: RunCallback(folder / "run", memory_step=None, trace_step=None),
        DP2,
        "Load the model with megatron_config=, or remove the callback",
    ),
    "timeline": (
        lambda folder: TimelineCallback(folder / "pictures", steps=(1,)),
        PP2,
        r"Load it with megatron_config=MegatronConfig\(pp_size=...\) and pp_size of at least 2, or remove the callback",
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_gets_a_parallelized_model_or_is_removed(stories, tmp_path, name):
    make_callback, layout, message = CALLBACKS[name]
    [expected] = run_ranks(lambda: train(make_trainer(stories, tmp_path, None)), 1)

    def on_rank():
        # A stock model of a job with one rank has no layout.
        callback = make_callback(tmp_path)
        trainer = make_trainer(stories, tmp_path, None, [callback])
        with pytest.raises(ConfigError, match=message):
            trainer.train()
        trainer.remove_callback(callback)
        return train(trainer)

    [without] = run_ranks(on_rank, 1)
    assert without == [pytest.approx(step, rel=1e-5) for step in expected]

    def on_ranks():
        return train(make_trainer(stories, tmp_path, layout, [make_callback(tmp_path)], layout.dp_size or 1))

    for steps in run_ranks(on_ranks, 2):
        assert steps == [pytest.approx(step, rel=1e-4) for step in expected]

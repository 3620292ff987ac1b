"""Tests of stock Trainer with pipeline parallelism: every logged value matches a single process."""

import dataclasses
import functools
import math
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_megatron import ConfigError, RankError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.grad_reducer import GradientReducer
from hf_megatron.data_parallel.grad_store import PlainGradients
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.dp_training import count_ranks
from tests.helpers.references import train_single_process
from tests.integration.integrations.trainer.test_trainer import accuracy, mean_loss, rows
from tests.integration.test_stories import examples

PP2 = ConfigUnderTest(pp_size=2, num_microbatches=3)
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_samples", "epoch", "step")
DEFAULTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
}


def layout(**fields):
    return dataclasses.replace(PP2, **fields)


class StashCounter:
    """Counts how often gradients need a second buffer."""

    def __init__(self):
        self.count = 0
        for store in (PlainGradients, GradientReducer):
            store.stash = self._counting(store.stash)

    def _counting(self, stash):
        def counting(store):
            self.count += not store.is_empty
            return stash(store)

        return counting


def train(
    path,
    output,
    config,
    trainer_class=Trainer,
    train_rows=24,
    samples=rows,
    collate=default_data_collator,
    resume=None,
    **kwargs,
):
    """Returns the logs of Trainer, and how often gradients needed a second buffer."""
    extra = {name: kwargs.pop(name) for name in ("compute_loss_func", "callbacks") if name in kwargs}
    sums = StashCounter()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    trainer = trainer_class(
        model,
        TrainingArguments(str(output), **(DEFAULTS | kwargs)),
        train_dataset=samples(train_rows, 0),
        eval_dataset=samples(12, 1),
        data_collator=collate,
        compute_metrics=accuracy,
        **extra,
    )
    result = trainer.train(resume_from_checkpoint=resume)
    log = [{name: entry[name] for name in LOGGED if name in entry} for entry in trainer.state.log_history]
    log.append({"train_loss": result.training_loss, "tokens": trainer.state.num_input_tokens_seen})
    return log, sums.count


def max_relative_difference(found, expected):
    """Returns the largest relative difference between two logs."""
    assert [list(entry) for entry in found] == [list(entry) for entry in expected]
    pairs = [(entry[name], reference[name]) for entry, reference in zip(found, expected, strict=True) for name in entry]
    return max(abs(value - other) / max(abs(other), 1e-12) for value, other in pairs)


def compare(stories, tmp_path, config=PP2, tolerance=2e-6, own_sums=0, **kwargs):
    dp_size = config.dp_size or 1
    batch_sizes = {f"per_device_{kind}_batch_size": 4 // dp_size for kind in ("train", "eval")}
    expected, _ = train_single_process(train, stories, **kwargs)
    results = run_ranks(train, count_ranks(config), stories, tmp_path, config, timeout=200, **(batch_sizes | kwargs))
    assert len(expected) >= 4 and all(math.isfinite(value) for entry in expected for value in entry.values())
    for log, sums in results:
        assert log == results[0][0], "every rank logs the same"
        assert max_relative_difference(log, expected) < tolerance
        assert sums == own_sums
    return expected


@functools.cache
def story_blocks(stories, texts):
    """Overlapping chunks of real text; unlike random tokens, training on them does not amplify rounding."""
    stream = torch.cat([ids[0] for ids in examples(stories, texts)])
    blocks = [stream[start : start + 48] for start in range(0, len(stream) - 48, 12)]

    def samples(count, seed):
        return [{"input_ids": block, "labels": block} for block in blocks[seed : seed + 2 * count : 2]]

    return samples


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (PP2, 10),
        (layout(pp_size=2, dp_size=2, zero_stage=2), 10),
        (layout(tp_size=2, sequence_parallel=True), 10),
        (layout(pipeline_schedule="interleaved_1f1b", virtual_stages=2, num_microbatches=4), 10),
    ],
    ids=["pp2", "pp2+dp2+zero2", "tp2+sp+pp2", "interleaved"],
)
def test_trajectory_with_accumulation_clipping_and_evaluation(stories, story_texts, tmp_path, config, steps):
    compare(
        stories,
        tmp_path,
        config,
        tolerance=1e-5,
        samples=story_blocks(stories, tuple(story_texts)),
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=steps // 5,
        lr_scheduler_type="cosine",
        learning_rate=5e-4,
    )


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(*args, step, **kwargs):
    callbacks = [KillAt(step)] if torch.distributed.get_rank() == 1 else []
    return train(*args, callbacks=callbacks, **kwargs)


def test_trajectory_survives_kills_and_layout_changes(stories, story_texts, tmp_path):
    """50 steps: killed on pp2, killed again on pp2+dp2, finished on pp2+tp2."""
    arguments = {
        "samples": story_blocks(stories, tuple(story_texts)),
        "max_steps": 50,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_strategy": "steps",
        "save_steps": 10,
        "save_total_limit": 2,
        "learning_rate": 5e-4,
    }
    expected, _ = train_single_process(train, stories, **(arguments | {"save_strategy": "no"}))
    output = tmp_path
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(train_until_killed, 2, stories, output, PP2, step=23, **arguments)
    halves = {f"per_device_{kind}_batch_size": 2 for kind in ("train", "eval")}
    config = layout(dp_size=2, zero_stage=2)
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(train_until_killed, 4, stories, output, config, step=36, resume=True, **(arguments | halves))
    for log, _ in run_ranks(train, 4, stories, output, layout(tp_size=2), resume=True, **arguments):
        # The mean loss of a resumed run covers other steps.
        assert max_relative_difference(log[:-2], expected[:-2]) < 1e-5


def test_epoch_ends_with_partial_batch_and_step(stories, tmp_path):
    """The last batch has one sample, fewer than the microbatches; the last step has one batch instead of two."""
    expected = compare(stories, tmp_path, train_rows=17, max_steps=-1, num_train_epochs=2, eval_strategy="epoch")
    assert expected[-2]["step"] == 6


def test_without_averaging_tokens_across_devices(stories, tmp_path):
    config = layout(dp_size=2, zero_stage=0)
    arguments = {"average_tokens_across_devices": False, "include_num_input_tokens_seen": "all"}
    # Trainer then uses per-rank denominators; equal numbers of labels make them equal to the global one.
    compare(stories, tmp_path, config, samples=make_fully_labeled_samples, **arguments)


def make_fully_labeled_samples(count, seed):
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"].clone()} for row in rows(count, seed, 17)]


def make_ragged_samples(count, seed):
    """Samples of different lengths."""
    return [
        {name: value[: 9 + 5 * (index % 5)] for name, value in row.items()}
        for index, row in enumerate(rows(count, seed))
    ]


def pad(samples):
    pad_values = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    samples = [{**sample, "attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples]
    return {
        name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], True, value)
        for name, value in pad_values.items()
    }


def test_batches_padded_to_longest_sample(stories, tmp_path):
    arguments = {"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "non_padding"}
    compare(stories, tmp_path, samples=make_ragged_samples, collate=pad, max_steps=6, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"label_smoothing_factor": 0.1},
        {"compute_loss_func": mean_loss},
    ],
    ids=["checkpointing", "reentrant", "label smoothing", "compute_loss_func"],
)
def test_training_options_match_single_process(stories, tmp_path, arguments):
    compare(stories, tmp_path, **arguments)


class OutOfMemoryOnce(Trainer):
    failed = False

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 1 and not self.failed:
            self.failed = True
            self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, num_items_in_batch)


def test_smaller_batch_after_oom(stories, tmp_path):
    """The error is raised mid-step, after a forward whose gradients are already computed."""
    compare(stories, tmp_path, trainer_class=OutOfMemoryOnce, auto_find_batch_size=True, own_sums=0)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute(stories, tmp_path, recompute):
    compare(stories, tmp_path, layout(recompute=recompute))


def test_bf16_error_is_bounded_by_single_process(stories, tmp_path):
    exact, _ = train_single_process(train, stories)
    expected, _ = train_single_process(train, stories, bf16=True)
    assert 1e-5 < max_relative_difference(expected, exact) < 0.05
    for config in (PP2, layout(tp_size=2)):
        for log, sums in run_ranks(train, count_ranks(config), stories, tmp_path, config, bf16=True):
            assert max_relative_difference(log, exact) <= 1.5 * max_relative_difference(expected, exact)
            assert sums == 0


class VaryingLossScale(Trainer):
    """Scales the loss of each batch by a different factor, which is unknown before the forward."""

    batches = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.batches += 1
        return super().compute_loss(model, inputs, False, num_items_in_batch) * (2 + self.batches % 3)


def test_varying_loss_scale_uses_second_buffer(stories, tmp_path):
    compare(stories, tmp_path, trainer_class=VaryingLossScale, own_sums=4)


class LogitsLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits.float()
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        loss = losses.sum() / num_items_in_batch
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss


def test_logits_loss_subclass(stories, tmp_path):
    compare(stories, tmp_path, trainer_class=LogitsLoss)


class DoubleForwardLoss(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        original = model.forward

        def forward(*args, **kwargs):
            output = original(*args, **kwargs)
            output.loss = output.loss * 2
            return output

        model.forward = forward


def test_wrong_announced_loss_scale_is_corrected(stories, tmp_path):
    """The error is detected on the first gradients of a step; later losses use a second buffer."""
    expected, _ = train_single_process(train, stories, callbacks=[DoubleForwardLoss()])
    for log, sums in run_ranks(train, 2, stories, tmp_path, PP2, callbacks=[DoubleForwardLoss()]):
        assert max_relative_difference(log, expected) < 2e-6
        assert sums == 4


class NanLoss(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss * math.nan if self.state.global_step == 1 else loss


def test_nan_loss_filter(stories, tmp_path):
    compare(stories, tmp_path, trainer_class=NanLoss, gradient_accumulation_steps=1)


class EventRecorder(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.events.append("pre_optimizer_step")

    def on_substep_end(self, args, state, control, **kwargs):
        self.events.append("substep_end")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.events.append("optimizer_step")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(f"evaluate {metrics['eval_samples']}")


def record_events(path, output, config):
    recorder = EventRecorder()
    train(path, output, config, callbacks=[recorder], max_steps=2, eval_strategy="steps", eval_steps=2)
    return recorder.events


def test_callback_events_match_single_process(stories, tmp_path):
    [expected] = run_ranks(record_events, 1, stories, tmp_path, None)
    assert expected[:3] == ["substep_end", "pre_optimizer_step", "optimizer_step"] and expected[-1] == "evaluate 12"
    assert run_ranks(record_events, 2, stories, tmp_path, PP2) == [expected, expected]


def batches(path, output, config):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    arguments = TrainingArguments(str(output), **(DEFAULTS | {"dataloader_drop_last": True}))
    trainer = Trainer(model, arguments, train_dataset=rows(24, 0), data_collator=default_data_collator)
    return [batch["input_ids"].tolist() for batch in trainer.get_train_dataloader()]


def test_pipeline_ranks_read_same_batches(stories, tmp_path):
    config = layout(tp_size=2, dp_size=2)
    rank_batches = run_ranks(batches, 8, stories, tmp_path, config)
    replicas = {str(batch) for batch in rank_batches}
    assert len(replicas) == 2 and all([str(f) for f in rank_batches].count(batch) == 4 for batch in replicas)


def test_mismatched_accelerator_plugin_is_rejected(stories):
    from accelerate import Accelerator

    from hf_megatron import MegatronPlugin

    def prepare():
        # Two ranks per batch like the model, but by tp instead of pp.
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(tp_size=2))
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=PP2)
        with pytest.raises(ConfigError, match="pp_size = 2 \\(plugin: 1\\)"):
            accelerator.prepare(model)

    run_ranks(prepare, 2)

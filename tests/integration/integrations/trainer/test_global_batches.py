"""Tests that padding, predictions and token counts on data-parallel ranks match a single process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.trainer import global_batches
from hf_megatron.integrations.trainer.global_batches import _CountedRows
from tests.helpers.dp_training import count_ranks
from tests.integration.integrations.trainer.test_padded_batches import COUNTS, layout


def make_samples(count, seed=0, vocabulary=64):
    """Returns samples of unequal length, each with a name."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        ids = torch.randint(3, vocabulary, (3 + (7 * index + 4) % 11,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids.clone(), "names": f"row {index}"})
    return samples


class Padding:
    """Collator that pads to the longest sample, on either side."""

    def __init__(self, side="right"):
        self.side = side

    def __call__(self, samples):
        def pad(values, value):
            return torch.nn.utils.rnn.pad_sequence(values, True, value, self.side)

        ids = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": pad(ids, 0),
            "attention_mask": pad([torch.ones_like(row) for row in ids], 0),
            "labels": pad([sample["labels"] for sample in samples], -100),
        }


def summarize_prediction(prediction):
    """Summarizes all inputs of `compute_metrics`, including padding."""
    logits, inputs = prediction.predictions, prediction.inputs
    return {
        "width": logits.shape[1],
        "logits": float(np.abs(logits).mean()),
        "places": float((inputs * np.arange(1, inputs.shape[1] + 1)).sum()),
        "labels": int(prediction.label_ids.sum()),
        "loss of rows": float(prediction.losses.sum()),
    }


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def predict(path, output, side, config=None, kind=list, **arguments):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    dp_size = 1 if config is None else config.dp_size
    arguments = TrainingArguments(
        str(output),
        per_device_eval_batch_size=6 // dp_size,
        include_for_metrics=["inputs", "loss"],
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **arguments,
    )
    trainer = Trainer(model, arguments, Padding(side), compute_metrics=summarize_prediction)
    data, results = make_samples(12), []
    for count in COUNTS:
        metrics = trainer.evaluate(kind(data[:count]))
        prediction = trainer.predict(kind(data[:count]))
        values = {name: value for name, value in metrics.items() if "runtime" not in name and "second" not in name}
        values.pop("eval_model_preparation_time", None)
        results.append((values, prediction.predictions, prediction.label_ids))
    return results


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model with learned positions, which it counts from the first column, whether padding or not."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


def compare(found, expected):
    assert len(found) == len(expected) == len(COUNTS)
    for (metrics, predictions, labels), (reference, logits, targets) in zip(found, expected, strict=True):
        assert metrics == pytest.approx(reference, rel=2e-5)
        np.testing.assert_allclose(predictions, logits, atol=1e-4)
        np.testing.assert_array_equal(labels, targets)


@pytest.mark.parametrize(
    ("text", "side", "arguments"),
    [
        ("dp2", "right", {"eval_accumulation_steps": 1}),
        ("dp2", "left", {"dataloader_num_workers": 1}),
        ("dp2+zero3", "right", {}),
        ("tp2+dp2", "left", {}),
        ("pp2+dp2", "right", {}),
    ],
)
def test_predictions_on_unequal_length_samples(gpt2, tmp_path, text, side, arguments):
    config = layout(text)
    [expected] = run_ranks(predict, 1, gpt2, tmp_path, side)
    for results in run_ranks(predict, count_ranks(config), gpt2, tmp_path, side, config=config, **arguments):
        compare(results, expected)


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2"])
def test_predictions_on_iterable_dataset(gpt2, tmp_path, text):
    config = layout(text)
    [expected] = run_ranks(predict, 1, gpt2, tmp_path, "right", kind=Stream)
    # With tensor parallelism each rank always reads the stream itself.
    arguments = {"accelerator_config": {"dispatch_batches": False}} if text == "dp2" else {}
    results = run_ranks(predict, count_ranks(config), gpt2, tmp_path, "right", config=config, kind=Stream, **arguments)
    for result in results:
        compare(result, expected)


def test_rank_local_padding_is_detected(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(global_batches, "pad_for_all_ranks", lambda loader: None)
    [expected] = run_ranks(predict, 1, gpt2, tmp_path, "left")
    [results, _] = run_ranks(predict, 2, gpt2, tmp_path, "left", config=layout("dp2"))
    with pytest.raises(AssertionError):
        compare(results, expected)
    assert [entry[0]["eval_loss"] for entry in results] != pytest.approx([entry[0]["eval_loss"] for entry in expected])


def generate(path, output, kind, side, config=None):
    model = kind.from_pretrained(path, megatron_config=config)
    arguments = Seq2SeqTrainingArguments(
        str(output),
        per_device_eval_batch_size=4 if config is None else 2,
        predict_with_generate=True,
        generation_max_length=24,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(model, arguments, Padding(side))
    predictions = [trainer.predict(make_samples(count)) for count in (5, 7, 8)]
    return [(each.predictions, each.label_ids, each.metrics["test_loss"]) for each in predictions]


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModelForSeq2SeqLM])
def test_generation_with_early_eos(tmp_path, kind):
    """Ranks stop when their own samples are finished; labels shorter than `max_length` are padded with tokens."""
    torch.manual_seed(0)
    ends = {"eos_token_id": [1, *range(30, 50)], "pad_token_id": 0}
    if kind is AutoModelForCausalLM:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, **ends))
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **ends))
    model.generation_config.max_length = 8
    model.save_pretrained(tmp_path / "model")
    side = "left" if kind is AutoModelForCausalLM else "right"
    [expected] = run_ranks(generate, 1, tmp_path / "model", tmp_path, kind, side)
    for results in run_ranks(generate, 2, tmp_path / "model", tmp_path, kind, side, config=layout("dp2")):
        for (tokens, labels, loss), reference in zip(results, expected, strict=True):
            np.testing.assert_array_equal(tokens, reference[0])
            np.testing.assert_array_equal(labels, reference[1])
            assert loss == pytest.approx(reference[2], rel=2e-5)


def count(path, output, collator, config=None, resume=None, kind=list, **arguments):
    """Returns the losses and token counts of two epochs whose last batches are not full."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    dp_size = 1 if config is None else config.dp_size
    defaults = {
        "per_device_train_batch_size": 4 // dp_size,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "include_num_input_tokens_seen": "all",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(model, TrainingArguments(str(output), **defaults | arguments), collator, kind(make_samples(13)))
    trainer.train(resume_from_checkpoint=resume)
    return [(entry["loss"], entry["num_input_tokens_seen"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2", "dp4"])
def test_token_counts_include_padding(gpt2, tmp_path, text):
    """The last sample of an epoch is on one rank; the other ranks have none."""
    config = layout(text)
    [expected] = run_ranks(count, 1, gpt2, tmp_path, Padding("left"))
    for log in run_ranks(count, count_ranks(config), gpt2, tmp_path, Padding("left"), config=config):
        assert [tokens for _, tokens in log] == [tokens for _, tokens in expected]
        assert [loss for loss, _ in log] == pytest.approx([loss for loss, _ in expected], rel=2e-5)


@pytest.mark.parametrize("kind", [list, Stream])
def test_token_counts_after_mid_epoch_resume(gpt2, tmp_path, kind):
    arguments = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1, "kind": kind}
    if kind is Stream:
        arguments |= {"max_steps": 8, "accelerator_config": {"dispatch_batches": False}}
    [expected] = run_ranks(count, 1, gpt2, tmp_path / "one", Padding(), **arguments)
    run_ranks(count, 2, gpt2, tmp_path / "two", Padding(), config=layout("dp2"), **arguments)
    folder = str(tmp_path / "two" / "checkpoint-2")
    for log in run_ranks(count, 2, gpt2, tmp_path / "three", Padding(), layout("dp2"), resume=folder, **arguments):
        assert np.allclose(log, expected, rtol=2e-5)


def evaluate_stream(path, output, config=None):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    rows = [{"input_ids": row["input_ids"][:3], "labels": row["input_ids"][:3]} for row in make_samples(6)]
    arguments = TrainingArguments(str(output), use_cpu=True, report_to=[], per_device_eval_batch_size=4)
    return Trainer(model, arguments).evaluate(Stream(rows))["eval_loss"]


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_last_stream_batch_on_model_parallel_ranks(gpt2, tmp_path, text):
    """Accelerate counts the samples of this batch once per rank."""
    [expected] = run_ranks(evaluate_stream, 1, gpt2, tmp_path)
    for loss in run_ranks(evaluate_stream, 2, gpt2, tmp_path, layout(text)):
        assert loss == pytest.approx(expected, rel=1e-5)


class LeftTokenizer(Padding):
    """A collator whose tokenizer declares the padding side."""

    def __init__(self):
        super().__init__("left")
        self.tokenizer = SimpleNamespace(padding_side="left", model_input_names=["attention_mask"])


@pytest.mark.parametrize("collator", [LeftTokenizer(), Padding("left")], ids=["said", "unsaid"])
def test_left_padded_samples(gpt2, tmp_path, collator):
    """The first token after padding is predicted from the padding and has another position."""
    arguments = {"include_num_input_tokens_seen": "non_padding"}
    [expected] = run_ranks(count, 1, gpt2, tmp_path, collator, **arguments)
    for log in run_ranks(count, 2, gpt2, tmp_path, collator, config=layout("dp2"), **arguments):
        assert np.allclose(log, expected, rtol=2e-5)


def concatenate_samples(samples):
    """Concatenates samples into one sequence, as padding-free collators do."""
    ids = torch.cat([sample["input_ids"] for sample in samples])
    places = torch.cat([torch.arange(len(sample["input_ids"])) for sample in samples])
    return {"input_ids": ids[None], "labels": ids[None], "position_ids": places[None]}


@pytest.mark.parametrize("size", [4, 2])
def test_padding_free_collator_adds_no_padding(gpt2, tmp_path, size):
    """The first twelve samples fill all batches, also with one sample per rank."""
    arguments = {"include_num_input_tokens_seen": "all", "max_steps": 3, "gradient_accumulation_steps": 1}
    [expected] = run_ranks(count, 1, gpt2, tmp_path, concatenate_samples, per_device_train_batch_size=size, **arguments)
    for log in run_ranks(
        count, 2, gpt2, tmp_path, concatenate_samples, layout("dp2"), per_device_train_batch_size=size // 2, **arguments
    ):
        assert [tokens for _, tokens in log] == [tokens for _, tokens in expected]


@pytest.mark.parametrize(("rows", "expected"), [(8, [4, 5, 6, 7]), (6, [4, 5]), (4, None)])
def test_stream_of_plain_tensors_ends_where_a_rank_has_no_samples(rows, expected):
    """A batch without names has no targets to mask, so the loader ends on all ranks."""
    collate = _CountedRows(torch.stack, rank=1, size=4)
    batch = collate([torch.tensor(row) for row in range(rows)])
    assert batch.rows == rows and (None if batch.batch is None else batch.batch.tolist()) == expected

"""Trainer's evaluation on data parallel ranks, where the rows do not fill the last batch: one process's numbers."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron.verify.check import parse_layouts
from hf_megatron.verify.parity import ConfigUnderTest
from hf_megatron.verify.ranks import run_ranks

from .dp_training import ranks_of
from .test_trainer import accuracy, rows

# Of the batches of 2 x 3 rows the last has: both ranks' rows in part, one's alone, a single row, all.
COUNTS = (10, 9, 7, 12)


def evaluate(model, output, dataset, batch_size, **kwargs):
    arguments = TrainingArguments(
        str(output), per_device_eval_batch_size=batch_size, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, data_collator=default_data_collator, **kwargs)
    found = []
    for count in COUNTS:
        metrics = trainer.evaluate(dataset[:count])
        found.append(
            {name: metrics[name] for name in metrics if name in ("eval_loss", "eval_accuracy", "eval_samples")}
        )
        prediction = trainer.predict(dataset[:count])
        found.append((prediction.predictions, prediction.label_ids, prediction.metrics["test_loss"]))
    return found


def tokens(path, output, config=None):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    dp_size = 1 if config is None else config.dp_size
    return evaluate(model, output, rows(12, 1), 6 // dp_size, compute_metrics=accuracy)


def compare(found, expected):
    assert len(found) == len(expected) == 2 * len(COUNTS)
    for metrics, reference in zip(found[::2], expected[::2], strict=True):
        assert metrics == pytest.approx(reference, rel=2e-5)
    for prediction, reference in zip(found[1::2], expected[1::2], strict=True):
        np.testing.assert_allclose(prediction[0], reference[0], atol=1e-4)
        np.testing.assert_array_equal(prediction[1], reference[1])
        assert prediction[2] == pytest.approx(reference[2], rel=2e-5)


def layout(text):
    [config] = parse_layouts(text)
    return ConfigUnderTest(**config.to_dict())


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3", "tp2+sp+dp2", "pp2+dp2"])
def test_losses_and_metrics_of_tokens(stories, tmp_path, text):
    config = layout(text)
    expected = tokens(stories, tmp_path)
    for found in run_ranks(tokens, ranks_of(config), stories, tmp_path, config):
        compare(found, expected)


def test_losses_of_classes(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    paths = {}
    torch.manual_seed(0)
    for labels in (3, 1):
        config = LlamaConfig(vocab_size=64, num_labels=labels, pad_token_id=0, **sizes)
        paths[labels] = tmp_path / str(labels)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(paths[labels])
    for labels, path in paths.items():
        values = torch.arange(12) % 3 if labels == 3 else torch.linspace(-1, 1, 12)
        dataset = [{"input_ids": torch.arange(i + 3, i + 9), "labels": value} for i, value in enumerate(values)]

        def run(config=None, path=path, dataset=dataset):
            model = AutoModelForSequenceClassification.from_pretrained(path, megatron_config=config)
            return evaluate(model, tmp_path / "out", dataset, 6 if config is None else 3)

        expected = run()
        for found in run_ranks(run, 2, layout("dp2")):
            compare(found, expected)

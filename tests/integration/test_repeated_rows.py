"""Batches of data parallel ranks that are not full, or drawn: the numbers of one process."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_megatron import MegatronPlugin
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


class Masking:
    """Draws as masked language modelling does: for the whole batch, and then for the whole batch again."""

    def __init__(self, draws=True):
        self.draws, self.rows = draws, []

    def __call__(self, samples):
        batch = {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}
        self.rows.append(len(samples))
        if self.draws:
            shape = batch["input_ids"].shape
            batch["input_ids"] = torch.where(
                torch.rand(shape) < 0.5, torch.randint(600, 700, shape), batch["input_ids"]
            )
        return batch


def batches_of(draws, count, drop_last=False, config=None):
    collator = Masking(draws)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=None if config is None else MegatronPlugin(config))
    size = 4 if config is None else 2
    loader = DataLoader(rows(count, 0), batch_size=size, collate_fn=collator, drop_last=drop_last)
    loader = accelerator.prepare(loader)
    set_seed(5)
    found = [accelerator.gather_for_metrics(batch["input_ids"]) for _ in range(2) for batch in loader]
    return found, torch.rand(2).tolist(), collator.rows


@pytest.mark.parametrize("arguments", [(True, 11), (True, 9), (True, 8), (True, 11, True), (False, 11)])
def test_masks_are_those_of_one_process(arguments):
    [(expected, state, _)] = run_ranks(batches_of, 1, *arguments)
    for found, after, collated in run_ranks(batches_of, 2, *arguments, config=layout("dp2")):
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        assert after == state
        # Nobody else pays for it.
        assert max(collated) == (4 if arguments[0] else 2)

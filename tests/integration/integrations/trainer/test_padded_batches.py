"""Tests that partial or random batches on data-parallel ranks match a single process."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Sampler
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_megatron import ConfigError, MegatronPlugin
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.integrations.accelerate import batch_shards
from hf_megatron.testing.parity import ConfigUnderTest
from tests.helpers.dp_training import count_ranks
from tests.integration.integrations.trainer import test_resume, test_trainer
from tests.integration.integrations.trainer.test_trainer import accuracy, rows

# With batches of 2 x 3 samples, the last batch holds samples of both ranks, of one rank, a single sample, or is full.
COUNTS = (10, 9, 7, 12)


def evaluate(model, output, dataset, batch_size, **kwargs):
    arguments = TrainingArguments(
        str(output), per_device_eval_batch_size=batch_size, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(model, arguments, data_collator=default_data_collator, **kwargs)
    results = []
    for count in COUNTS:
        metrics = trainer.evaluate(dataset[:count])
        results.append(
            {name: metrics[name] for name in metrics if name in ("eval_loss", "eval_accuracy", "eval_samples")}
        )
        prediction = trainer.predict(dataset[:count])
        results.append((prediction.predictions, prediction.label_ids, prediction.metrics["test_loss"]))
    return results


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
def test_token_losses_and_metrics(stories, tmp_path, text):
    config = layout(text)
    expected = tokens(stories, tmp_path)
    for results in run_ranks(tokens, count_ranks(config), stories, tmp_path, config):
        compare(results, expected)


def test_classification_losses(tmp_path):
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
        for results in run_ranks(run, 2, layout("dp2")):
            compare(results, expected)


class Masking:
    """Collator that draws masks and replacements for the global batch, as masked language modeling does."""

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


def read_batches(draws, count, drop_last=False, config=None):
    collator = Masking(draws)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=None if config is None else MegatronPlugin(config))
    size = 4 if config is None else 2
    loader = DataLoader(rows(count, 0), batch_size=size, collate_fn=collator, drop_last=drop_last)
    loader = accelerator.prepare(loader)
    set_seed(5)
    batches = [accelerator.gather_for_metrics(batch["input_ids"]) for _ in range(2) for batch in loader]
    return batches, torch.rand(2).tolist(), collator.rows


@pytest.mark.parametrize("arguments", [(True, 11), (True, 9), (True, 8), (True, 11, True), (False, 11)])
def test_masks_match_single_process(arguments):
    [(expected, state, _)] = run_ranks(read_batches, 1, *arguments)
    for batches, after, collated in run_ranks(read_batches, 2, *arguments, config=layout("dp2")):
        assert len(batches) == len(expected) and all(map(torch.equal, batches, expected))
        assert after == state
        # Without random draws ranks collate only their own samples.
        assert max(collated) == (4 if arguments[0] else 2)


def read_after_skipping(config=None):
    """Reads an epoch without its first batch, as after a mid-epoch resume, and the next epoch."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=None if config is None else MegatronPlugin(config))
    loader = DataLoader(rows(11, 0), batch_size=4 if config is None else 2, collate_fn=Masking())
    loader = accelerator.prepare(loader)
    set_seed(5)
    epochs = (accelerator.skip_first_batches(loader, 1), loader)
    return [accelerator.gather_for_metrics(batch["input_ids"]) for epoch in epochs for batch in epoch]


def test_masks_after_skipped_batches():
    [expected] = run_ranks(read_after_skipping, 1)
    for batches in run_ranks(read_after_skipping, 2, config=layout("dp2")):
        assert len(batches) == len(expected) and all(map(torch.equal, batches, expected))


class CyclicSampler(Sampler):
    """Samples `count` indices of a dataset in order, cyclically."""

    def __init__(self, dataset, count):
        self.dataset, self.count = dataset, count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(index % len(self.dataset) for index in range(self.count))


def gather_batches(skipped, sampled, kept, config=None, **configuration):
    """Gathers each batch as tensors, as objects, and with `use_gather_object`."""
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=None if config is None else MegatronPlugin(config),
        dataloader_config=DataLoaderConfiguration(**configuration),
    )
    data = torch.arange(kept)
    size = 4 if config is None or configuration else 2
    loader = DataLoader(data, batch_size=size, sampler=CyclicSampler(data, sampled) if sampled else None)
    loader = accelerator.prepare(loader)
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    return [
        (
            accelerator.gather_for_metrics({"rows": batch})["rows"].tolist(),
            accelerator.gather_for_metrics([str(row) for row in batch.tolist()]),
            accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True),
        )
        for batch in loader
    ]


# Accelerate truncates the last batch by the dataset size: to fewer samples than the sampler has, more, or none.
@pytest.mark.parametrize(
    "arguments",
    [(2, 0, 14), (0, 11, 14), (0, 9, 14), (1, 9, 14), (0, 17, 14), (0, 19, 14), (0, 11, 16), (0, 12, 14), (0, 12, 16)],
    ids=str,
)
def test_gathered_samples_with_samplers_and_skipping(arguments):
    [expected] = run_ranks(gather_batches, 1, *arguments)
    for batches in run_ranks(gather_batches, 2, *arguments, config=layout("dp2")):
        assert batches == expected
    for batches in run_ranks(gather_batches, 2, *arguments, config=layout("dp2"), split_batches=True):
        assert batches == expected


def test_gathered_samples_without_even_batches():
    """All ranks stop with the shortest one, with a warning; the samples read until then are gathered."""
    uneven = run_ranks(gather_batches, 2, 0, 0, 10, config=layout("dp2"), even_batches=False, split_batches=False)
    for batches in uneven:
        assert [rows for rows, *_ in batches] == [[0, 1, 2, 3, 4, 5, 6, 7]]


class SampledTrainer(Trainer):
    def _get_eval_sampler(self, eval_dataset):
        return CyclicSampler(eval_dataset, 9)


def evaluate_samples(path, output, count, config=None):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    arguments = TrainingArguments(
        str(output),
        per_device_eval_batch_size=4 if config is None else 2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SampledTrainer(model, arguments, data_collator=default_data_collator, compute_metrics=accuracy)
    prediction = trainer.predict(rows(count, 1))
    return prediction.predictions, prediction.metrics["test_loss"], prediction.metrics["test_accuracy"]


# In a single process the loss of the last batch, of one sample, is weighted as two samples, or four.
@pytest.mark.parametrize("count", [14, 16])
def test_evaluation_with_custom_sampler(stories, tmp_path, count):
    [expected] = run_ranks(evaluate_samples, 1, stories, tmp_path, count)
    for results in run_ranks(evaluate_samples, 2, stories, tmp_path, count, config=layout("dp2")):
        np.testing.assert_allclose(results[0], expected[0], atol=1e-4)
        assert results[1:] == pytest.approx(expected[1:], rel=2e-5)


def read_shuffled(configuration, own_generator, config=None):
    set_seed(5)
    plugin = None if config is None else MegatronPlugin(config)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, dataloader_config=configuration)
    generator = torch.Generator().manual_seed(3) if own_generator else None
    loader = DataLoader(torch.arange(12), batch_size=4 if config is None else 2, shuffle=True, generator=generator)
    loader = accelerator.prepare(loader)
    return [accelerator.gather_for_metrics(batch).tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize(
    "arguments", [(DataLoaderConfiguration(use_seedable_sampler=True), False), (DataLoaderConfiguration(), True)]
)
def test_shuffled_samples(arguments):
    [expected] = run_ranks(read_shuffled, 1, *arguments)
    assert run_ranks(read_shuffled, 2, *arguments, config=layout("dp2")) == [expected, expected]


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3"])
def test_resume_within_an_epoch(stories, tmp_path, text):
    """With batches of 2 x 5 samples, one rank has four samples of the last batch, the other none."""

    def run(output, config, **kwargs):
        size = 10 if config is None else 5
        return test_resume.train(
            stories,
            output,
            config,
            steps=3,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=1,
            **kwargs,
        )

    [(log, weights, _)] = run_ranks(run, 1, tmp_path / "one", None, save_strategy="no")
    run_ranks(run, 2, tmp_path / "two", layout(text), stop=2)
    resumed_log, resumed, _ = run_ranks(run, 2, tmp_path / "two", layout(text), resume=True)[0]
    assert resumed_log[-1] == pytest.approx(log[-1], rel=2e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=3e-4)


def test_split_batches(stories, tmp_path):
    arguments = {
        "accelerator_config": {"split_batches": True},
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 6,
        "include_num_input_tokens_seen": "all",
        "max_steps": -1,
        "num_train_epochs": 1,
    }
    [expected] = run_ranks(test_trainer.train, 1, stories, tmp_path / "one", None, **arguments)
    results = run_ranks(test_trainer.train, 2, stories, tmp_path / "two", layout("dp2"), **arguments)[0]
    assert len(results[0]) == len(expected[0])
    for step, reference in zip(results[0], expected[0], strict=True):
        assert step == pytest.approx(reference, rel=2e-5)
    np.testing.assert_allclose(results[1], expected[1], atol=1e-4)


def summarize_tokens(prediction):
    tokens = np.where(prediction.predictions < 0, 0, prediction.predictions)
    return {"tokens": float((tokens * np.arange(1, tokens.shape[1] + 1)).sum()), "samples": len(tokens)}


def translate(path, output, beams, config=None):
    """Evaluates, trains one epoch, evaluates again and predicts, with generation."""
    model = AutoModelForSeq2SeqLM.from_pretrained(path, megatron_config=config)
    arguments = Seq2SeqTrainingArguments(
        str(output),
        per_device_train_batch_size=4 if config is None else 2,
        per_device_eval_batch_size=4 if config is None else 2,
        num_train_epochs=1,
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=beams,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    generator = torch.Generator().manual_seed(0)
    data = [
        {name: torch.randint(2, 64, (6,), generator=generator) for name in ("input_ids", "labels")} for _ in range(9)
    ]
    trainer = Seq2SeqTrainer(model, arguments, default_data_collator, data, data[:7], compute_metrics=summarize_tokens)
    log = [trainer.evaluate(data[:5])]
    log.append({"loss": trainer.train().training_loss})
    log.append(trainer.evaluate())
    prediction = trainer.predict(data[:5])
    names = ("loss", "eval_loss", "eval_tokens", "eval_samples")
    return [{name: entry[name] for name in names if name in entry} for entry in log], prediction.predictions


@pytest.mark.parametrize(("text", "beams"), [("dp2", 2), ("dp2+zero3", 1)])
def test_predict_with_generate(tmp_path, text, beams):
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "model")
    [(expected, tokens)] = run_ranks(translate, 1, tmp_path / "model", tmp_path, beams)
    assert expected[0]["eval_samples"] == 5
    for steps, predicted in run_ranks(translate, 2, tmp_path / "model", tmp_path, beams, config=layout(text)):
        for step, reference in zip(steps, expected, strict=True):
            assert step == pytest.approx(reference, rel=2e-5)
        np.testing.assert_array_equal(predicted, tokens)


def record_steps(path, output, strategy, config=None):
    """Returns the samples of each optimizer step of two epochs; the RNG states differ by rank before the second."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    dp_size = 1 if config is None else config.dp_size or 1
    arguments = TrainingArguments(
        str(output),
        per_device_train_batch_size=4 // dp_size,
        gradient_accumulation_steps=2,
        train_sampling_strategy=strategy,
        report_to=[],
        use_cpu=True,
    )
    data = [{"input_ids": torch.full((5 + 7 * index % 40,), index), "labels": index} for index in range(24)]
    trainer = Trainer(model, arguments, lambda some: {"rows": torch.tensor([row["labels"] for row in some])}, data)
    epochs, accelerator = [], trainer.accelerator
    loader = trainer.get_train_dataloader()
    for _ in range(2):
        batches = [batch["rows"].tolist() for batch in loader]
        every = accelerator.gather_for_metrics([batches], use_gather_object=True) if dp_size > 1 else [batches]
        steps = [[row for rank in every for batch in rank[step : step + 2] for row in batch] for step in (0, 2, 4)]
        epochs.append([sorted(step) for step in steps])
        if torch.distributed.is_initialized():
            torch.rand(torch.distributed.get_rank())
    return epochs


@pytest.mark.parametrize("text", ["dp2", "tp2"])
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_length_grouped_samples(stories, tmp_path, strategy, text):
    [expected] = run_ranks(record_steps, 1, stories, tmp_path, strategy)
    for epochs in run_ranks(record_steps, 2, stories, tmp_path, strategy, config=layout(text)):
        assert epochs[0] == expected[0] and sorted(sum(epochs[1], [])) == list(range(24))


def test_model_init_is_rejected(stories, tmp_path):
    def on_rank(config_on_rank):
        arguments = TrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, max_steps=2, logging_steps=1, per_device_train_batch_size=2
        )

        def model_init():
            return AutoModelForCausalLM.from_pretrained(stories, megatron_config=config_on_rank)

        data = {"train_dataset": rows(8, 0), "data_collator": default_data_collator}
        if config_on_rank is not None:
            # The first parallelized model of the process, such as a reference model, may not be loaded by Trainer.
            reference = model_init()
            message = r"Call set_seed\(args.seed\), then pass Trainer\(model=model_init\(\)\)"
            with pytest.raises(ConfigError, match=message):
                Trainer(args=arguments, model_init=model_init, **data)
            set_seed(arguments.seed)
            trainer = Trainer(model_init(), arguments, **data)
            del reference
        else:
            arguments.per_device_train_batch_size = 4
            trainer = Trainer(args=arguments, model_init=model_init, **data)
        trainer.train()
        return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]

    [alone] = run_ranks(on_rank, 1, None)
    assert len(alone) == 2
    for log in run_ranks(on_rank, 2, layout("dp2")):
        assert log == [pytest.approx(values, rel=1e-4) for values in alone]


class UnsizedStream(torch.utils.data.IterableDataset):
    """A stream of unknown length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def train_on_streams(path, output, config=None):
    """Trains on two streams that end within an accumulation; the first trainer stays alive."""
    replicas = 1 if config is None else config.dp_size
    trainers = []
    for count in (6, 11):
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
        arguments = TrainingArguments(
            str(output),
            **{"per_device_train_batch_size": 4 // replicas, "gradient_accumulation_steps": 2, "max_steps": 4},
            **{"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"},
            accelerator_config={"dispatch_batches": False},
        )
        stream = UnsizedStream(rows(count, 1))
        trainers.append(Trainer(model, arguments, train_dataset=stream, data_collator=default_data_collator))
        trainers[-1].train()
    logs = [entry for trainer in trainers for entry in trainer.state.log_history if "loss" in entry]
    return [{name: entry[name] for name in ("loss", "grad_norm")} for entry in logs]


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_streams_that_end_within_a_step(stories, tmp_path, monkeypatch, is_forgotten):
    expected = train_on_streams(stories, tmp_path)
    if is_forgotten:
        monkeypatch.setattr(batch_shards, "_ENDED", "_hf_megatron_nothing")
        monkeypatch.setattr(batch_shards, "_loader", lambda state: state.active_dataloader)
    logs = run_ranks(train_on_streams, 2, stories, tmp_path, layout("dp2"))
    assert len(expected) == 8
    agrees = [log == [pytest.approx(entry, rel=1e-4) for entry in expected] for log in logs]
    assert agrees == [not is_forgotten] * 2

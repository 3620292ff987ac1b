"""Tests of data that does not fill the last global batch: logs, and losses that would count samples twice."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, LlamaConfig, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.integrations.trainer import padded_batches
from tests.helpers.references import train_single_process
from tests.integration.integrations.trl.test_base import DEFAULTS, UNEQUAL, full_reference, policy, preferences, texts
from tests.integration.integrations.trl.test_losses import conversations, tokenizer, unpaired

[DP2] = parse_layouts("dp2")
# Global batches of four samples, in a single process and on two ranks.
PLAIN = DEFAULTS | {"eval_strategy": "no", "gradient_accumulation_steps": 1}


def make_batch_size_args(config):
    return {"per_device_train_batch_size": 4 if config is None else 2}


@pytest.mark.parametrize(("count", "each"), [(6, 2), (11, 3), (9, 1)])
def test_logs_with_prefetched_batches(stories, tmp_path, count, each):
    """Trainer reads all batches of a step before the first forward; only the last has repeated samples."""

    def train(path, output, config):
        trainer = SFTTrainer(
            model=policy(path, config, SFTTrainer),
            args=SFTConfig(
                str(output),
                **PLAIN | make_batch_size_args(config) | {"gradient_accumulation_steps": each, "max_steps": 3},
            ),
            train_dataset=Dataset.from_list(texts(count)),
        )
        trainer.train()
        return [
            {name: value for name, value in entry.items() if not any(part in name for part in UNEQUAL)}
            for entry in trainer.state.log_history
        ]

    expected = train_single_process(train, stories)
    assert {"entropy", "num_tokens", "mean_token_accuracy"} <= expected[0].keys()
    for log in run_ranks(train, 2, stories, tmp_path, DP2):
        assert len(log) == len(expected)
        for entry, other in zip(log, expected, strict=True):
            assert entry == pytest.approx(other, rel=2e-5, abs=1e-5)


REFUSED = "2 data-parallel ranks: .* Accelerate fills it with repeated samples, .* Set dataloader_drop_last=True"


PAIRED = {DPOTrainer: (DPOConfig, preferences), RewardTrainer: (RewardConfig, preferences)}
PAIRED |= {
    KTOTrainer: (KTOConfig, unpaired),
    ORPOTrainer: (ORPOConfig, preferences),
    CPOTrainer: (CPOConfig, preferences),
}


@pytest.mark.parametrize("trainer_class", PAIRED)
def test_uneven_preferences_are_rejected_before_training(stories, tmp_path, trainer_class):
    config_class, samples = PAIRED[trainer_class]
    # Experimental TRL trainers do not load the model's tokenizer.
    tokenizer_args = (
        {} if trainer_class.__module__.startswith("trl.trainer.") else {"processing_class": tokenizer(stories, DP2)}
    )

    def on_rank():
        def make_trainer(**changes):
            arguments = config_class(str(tmp_path), **PLAIN | make_batch_size_args(DP2) | changes)
            rows = Dataset.from_list(samples(6))
            return trainer_class(
                policy(stories, DP2, trainer_class), args=arguments, train_dataset=rows, **tokenizer_args
            )

        uneven = make_trainer()
        with pytest.raises(UnsupportedError, match=f"{trainer_class.__name__} on {REFUSED}"):
            uneven.train()
        assert uneven.state.global_step == 0
        # Runs that do not reach the partial batch train.
        return [
            make_trainer(max_steps=1).train().global_step,
            make_trainer(dataloader_drop_last=True).train().global_step,
        ]

    assert run_ranks(on_rank, 2) == [[1, 4], [1, 4]]


@pytest.mark.parametrize("trainer_class", [DPOTrainer, RewardTrainer, KTOTrainer])
def test_evaluation_counts_no_sample_twice(stories, tmp_path, trainer_class):
    config_class, samples = PAIRED[trainer_class]

    def evaluate(path, output, config):
        changes = {"per_device_eval_batch_size": 6 if config is None else 2}
        arguments = config_class(str(output), **PLAIN | make_batch_size_args(config) | changes)
        rows = Dataset.from_list(samples(4))
        trainer = trainer_class(
            policy(path, config, trainer_class),
            args=arguments,
            train_dataset=rows,
            eval_dataset={"first": Dataset.from_list(samples(6)), "second": Dataset.from_list(samples(12))},
        )
        if config is None:
            return trainer.evaluate()["eval_first_loss"]
        # Global batches of 2 x 2 samples do not divide six.
        with pytest.raises(
            UnsupportedError, match=f"{trainer_class.__name__} on 2 data-parallel .* 2 batches of 4 samples has 2"
        ):
            trainer.evaluate()
        with pytest.raises(UnsupportedError, match="per_device_eval_batch_size times the data-parallel ranks"):
            trainer.predict(trainer.eval_dataset["first"])
        trainer.args.eval_strategy = "steps"
        with pytest.raises(UnsupportedError, match="evaluate on a number of samples"):
            trainer.train()
        assert trainer.state.global_step == 0
        trainer.args.eval_strategy = "no"
        trainer.args.per_device_eval_batch_size = 3
        return trainer.evaluate()["eval_first_loss"]

    alone = train_single_process(evaluate, stories)
    assert run_ranks(evaluate, 2, stories, tmp_path, DP2) == [pytest.approx(alone, rel=2e-5)] * 2


@pytest.mark.parametrize("are_counted", [False, True])
def test_distillation_ignores_repeated_samples(stories, tmp_path, monkeypatch, are_counted):
    if are_counted:
        monkeypatch.setattr(padded_batches, "_mask_targets_after", lambda inputs, count: inputs)

    def train(path, output, config):
        trainer = GKDTrainer(
            model=policy(path, config, GKDTrainer),
            teacher_model=full_reference(path, config),
            args=GKDConfig(
                str(output), **PLAIN | make_batch_size_args(config) | {"lmbda": 0.0, "max_length": 64, "max_steps": 3}
            ),
            processing_class=tokenizer(path, config),
            train_dataset=Dataset.from_list(conversations(6)),
        )
        trainer.train()
        return [{name: entry[name] for name in ("loss", "grad_norm")} for entry in trainer.state.log_history[:-1]]

    expected = [pytest.approx(entry, rel=2e-5) for entry in train_single_process(train, stories)]
    for log in run_ranks(train, 2, stories, tmp_path, DP2):
        assert (log == expected) is not are_counted


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0, 0.5]))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("is_stream", [False, True])
def test_custom_classification_loss_is_rejected(tmp_path, is_stream):
    model_sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_labels=3, pad_token_id=0, **model_sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")

    def on_rank():
        rows = Dataset.from_list([{"input_ids": list(range(i + 3, i + 9)), "labels": i % 3} for i in range(6)])
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", megatron_config=DP2)
        arguments = TrainingArguments(str(tmp_path), **{**PLAIN, **make_batch_size_args(DP2), "max_steps": 3})
        trainer = Weighted(model, arguments, train_dataset=rows.to_iterable_dataset() if is_stream else rows)
        with pytest.raises(UnsupportedError, match=f"Weighted on {REFUSED}"):
            trainer.train()
        # The end of a stream is not known in advance.
        return trainer.state.global_step

    assert run_ranks(on_rank, 2) == [1 if is_stream else 0] * 2


def test_rejected_evaluation_after_training_is_announced_before_it(tmp_path):
    model_sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_labels=3, pad_token_id=0, **model_sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")

    def on_rank():
        rows = Dataset.from_list([{"input_ids": list(range(i + 3, i + 9)), "labels": i % 3} for i in range(9)])
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", megatron_config=DP2)
        arguments = TrainingArguments(str(tmp_path), **{**PLAIN, **make_batch_size_args(DP2), "max_steps": 1})
        trainer = Weighted(model, arguments, train_dataset=rows.select(range(8)), eval_dataset=rows)
        with pytest.warns(UserWarning, match=r"trainer.evaluate\(\) would raise: Weighted on 2 data-parallel ranks"):
            trainer.train()
        with pytest.raises(UnsupportedError, match="Weighted on 2"):
            trainer.evaluate()

    run_ranks(on_rank, 2)

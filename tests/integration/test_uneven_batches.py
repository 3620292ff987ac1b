"""Data whose rows do not fill the last batch of all ranks: logged numbers, and losses that would count rows twice."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, LlamaConfig, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_megatron import UnsupportedError
from hf_megatron.verify.check import parse_layouts
from hf_megatron.verify.ranks import run_ranks
from tests.references import trained_alone

from .test_trl import DEFAULTS, UNEQUAL, policy, preferences, texts

[DP2] = parse_layouts("dp2")
# Batches of four rows, of both ranks together in the second case.
PLAIN = DEFAULTS | {"eval_strategy": "no", "gradient_accumulation_steps": 1}


def sizes(config):
    return {"per_device_train_batch_size": 4 if config is None else 2}


@pytest.mark.parametrize(("count", "each"), [(6, 2), (11, 3), (9, 1)])
def test_numbers_of_batches_that_are_read_ahead(stories, tmp_path, count, each):
    """Trainer reads all batches of a step before the first forward: only the last of them has repeated rows."""

    def train(path, output, config):
        trainer = SFTTrainer(
            model=policy(path, config, SFTTrainer),
            args=SFTConfig(
                str(output), **PLAIN | sizes(config) | {"gradient_accumulation_steps": each, "max_steps": 3}
            ),
            train_dataset=Dataset.from_list(texts(count)),
        )
        trainer.train()
        return [
            {name: value for name, value in entry.items() if not any(part in name for part in UNEQUAL)}
            for entry in trainer.state.log_history
        ]

    expected = trained_alone(train, stories)
    assert {"entropy", "num_tokens", "mean_token_accuracy"} <= expected[0].keys()
    for log in run_ranks(train, 2, stories, tmp_path, DP2):
        assert len(log) == len(expected)
        for entry, other in zip(log, expected, strict=True):
            assert entry == pytest.approx(other, rel=2e-5, abs=1e-5)


REFUSED = "2 data parallel ranks: .* Accelerate repeats rows to fill it, .* Set dataloader_drop_last=True"


def test_preferences_are_refused_before_the_first_step(stories, tmp_path):
    def on_rank():
        def trainer(**changes):
            arguments = DPOConfig(str(tmp_path), **PLAIN | sizes(DP2) | changes)
            rows = Dataset.from_list(preferences(6))
            return DPOTrainer(policy(stories, DP2, DPOTrainer), args=arguments, train_dataset=rows)

        refused = trainer()
        with pytest.raises(UnsupportedError, match=f"DPOTrainer on {REFUSED}"):
            refused.train()
        assert refused.state.global_step == 0
        # What does not come to these rows trains.
        return [trainer(max_steps=1).train().global_step, trainer(dataloader_drop_last=True).train().global_step]

    assert run_ranks(on_rank, 2) == [[1, 4], [1, 4]]


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0, 0.5]))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_loss_of_ones_own_over_classes_is_refused(tmp_path, is_stream):
    sizes_of = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_labels=3, pad_token_id=0, **sizes_of)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")

    def on_rank():
        rows = Dataset.from_list([{"input_ids": list(range(i + 3, i + 9)), "labels": i % 3} for i in range(6)])
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", megatron_config=DP2)
        arguments = TrainingArguments(str(tmp_path), **{**PLAIN, **sizes(DP2), "max_steps": 3})
        trainer = Weighted(model, arguments, train_dataset=rows.to_iterable_dataset() if is_stream else rows)
        with pytest.raises(UnsupportedError, match=f"Weighted on {REFUSED}"):
            trainer.train()
        # A stream's end is not known before.
        return trainer.state.global_step

    assert run_ranks(on_rank, 2) == [1 if is_stream else 0] * 2

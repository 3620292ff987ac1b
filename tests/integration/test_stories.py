"""A trained model on real text: the loss at every layout, in Trainer's evaluation, and over fifty steps."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks


def examples(stories, texts):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    return [tokenizer(text, return_tensors="pt").input_ids[:, :512] for text in texts]


def compute_token_mean_loss(stories, texts, config):
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in examples(stories, texts):
            total += model(input_ids=ids, labels=ids, num_items_in_batch=1).loss.item()
            count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_token_mean_loss(stories, story_texts, tp_size):
    assert len(story_texts) == 5
    expected = compute_token_mean_loss(stories, story_texts, None)
    assert expected == pytest.approx(1.27, abs=0.01)
    for loss in run_ranks(compute_token_mean_loss, tp_size, stories, story_texts, MegatronConfig(tp_size=tp_size)):
        assert loss == pytest.approx(expected, rel=1e-6)


def make_padded_samples(stories, texts):
    samples = []
    for ids in examples(stories, texts):
        row = torch.zeros(512, dtype=torch.long)
        labels = torch.full((512,), -100)
        row[: ids.shape[1]], labels[: ids.shape[1]] = ids[0], ids[0]
        samples.append({"input_ids": row, "labels": labels, "attention_mask": (labels != -100).long()})
    return samples


def evaluate(stories, texts, config, output):
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    arguments = TrainingArguments(
        str(output), per_device_eval_batch_size=5, save_strategy="no", use_cpu=True, report_to=[]
    )
    return Trainer(model, arguments, eval_dataset=make_padded_samples(stories, texts)).evaluate()["eval_loss"]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_trainer_reports_the_same_loss(stories, story_texts, tp_size, tmp_path):
    """One batch of all five stories, so that Trainer's mean of batches is the mean of tokens."""
    expected = compute_token_mean_loss(stories, story_texts, None)
    config = MegatronConfig(tp_size=tp_size)
    for loss in run_ranks(evaluate, tp_size, stories, story_texts, config, tmp_path):
        assert loss == pytest.approx(expected, rel=1e-6)


def fine_tune(stories, texts, config, output, steps=50):
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    stream = torch.cat([ids[0] for ids in examples(stories, texts)])
    blocks = [stream[i : i + 64] for i in range(0, len(stream) - 64, 16)]
    arguments = TrainingArguments(
        str(output),
        max_steps=steps,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=5e-4,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": block, "labels": block} for block in blocks])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_fifty_steps_match_single_process(stories, story_texts, tmp_path):
    [expected] = run_ranks(fine_tune, 1, stories, story_texts, None, tmp_path)
    config = MegatronConfig(tp_size=2, sequence_parallel=True)
    for losses in run_ranks(fine_tune, 2, stories, story_texts, config, tmp_path):
        assert len(losses) == len(expected) == 50
        assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0]

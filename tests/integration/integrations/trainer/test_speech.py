"""Tests of Whisper with a stock `Seq2SeqTrainer` and generation in evaluation, against a single process."""

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, WhisperConfig, WhisperForConditionalGeneration

from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state

STEPS = 20
FRAMES, BINS, VOCABULARY, START, PAD = 32, 8, 64, 1, 0
_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
# Keeps updates by gradients that are zero in exact arithmetic negligible.
EPSILON = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    stacks = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in _STACK.items()}
    config = WhisperConfig(
        **stacks,
        vocab_size=VOCABULARY,
        num_mel_bins=BINS,
        d_model=32,
        max_source_positions=FRAMES // 2,
        max_target_positions=24,
        dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=2,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    folder = tmp_path_factory.mktemp("whisper")
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    return folder


def make_clips(count, seed):
    """Yields clips whose transcripts depend on the mean of each mel bin, with unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        features = torch.randn(BINS, FRAMES, generator=generator)
        transcript = 3 + features.mean(1).mul(200).long().abs() % (VOCABULARY - 3)
        yield {"input_features": features, "labels": transcript[: 3 + index % (BINS - 2)].tolist()}


def collate(rows):
    longest = max(len(row["labels"]) for row in rows)
    labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows]
    return {"input_features": torch.stack([row["input_features"] for row in rows]), "labels": torch.tensor(labels)}


def tokens(prediction):
    """Metric that changes with every single token."""
    return {"tokens": float((prediction.predictions * np.arange(1, prediction.predictions.shape[1] + 1)).sum())}


def train(checkpoint, output, config=None, rows=4):
    model = WhisperForConditionalGeneration.from_pretrained(checkpoint, megatron_config=config)
    arguments = Seq2SeqTrainingArguments(
        str(output),
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        learning_rate=3e-3,
        adam_epsilon=EPSILON,
        max_grad_norm=0.5,
        predict_with_generate=True,
        generation_max_length=8,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = list(make_clips(40, 0)), list(make_clips(6, 1))
    trainer = Seq2SeqTrainer(
        model,
        arguments,
        train_dataset=data[0],
        eval_dataset=data[1],
        data_collator=collate,
        compute_metrics=tokens,
    )
    trainer.train()
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    names = ("loss", "grad_norm", "eval_loss", "eval_tokens", "train_loss")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history], weights


@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}, {"dp_size": 2}],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
def test_twenty_steps_match_single_process(checkpoint, tmp_path, layout):
    config = ConfigUnderTest(**layout)
    [(expected, reference)] = run_ranks(train, 1, checkpoint, tmp_path / "one")
    results = run_ranks(train, 2, checkpoint, tmp_path / "two", config, 4 // (config.dp_size or 1))
    # One entry per step, two evaluations, and the final summary.
    assert len(expected) == STEPS + 3 and len({entry.get("eval_tokens") for entry in expected}) > 1
    for log, _ in results:
        for entry, other in zip(log, expected, strict=True):
            assert entry == pytest.approx(other, rel=2e-5)
    for name, weight in reference.items():
        assert (results[0][1][name] - weight).abs().max() <= 3e-5, name

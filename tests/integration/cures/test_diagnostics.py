"""Tests that follow the cures in errors of diagnostic tools."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.spans import SpanRecorder, bubble_share
from hf_megatron.diagnostics.divergence import compare_recordings
from hf_megatron.diagnostics.step_memory import memory_in
from hf_megatron.diagnostics.timeline import gather_timeline
from hf_megatron.integrations.trainer.callbacks.run import RunCallback
from hf_megatron.integrations.trainer.callbacks.watches import MemoryCallback
from hf_megatron.parallel_state import parallel_state
from tests.integration.diagnostics.test_divergence import _record

LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def test_steps_are_recorded_with_zero_stage_2(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path / "model")

    def on_rank():
        sizes = {"dp_size": 2, "zero_stage": 3}
        with pytest.raises(UnsupportedError, match=r"StepRecorder with zero_stage=3 .*Use zero_stage=2 or below\."):
            _record(tmp_path / "model", tmp_path / "ranks", sizes)
        for stage in (2, 1):
            _record(tmp_path / "model", tmp_path / f"ranks{stage}", sizes | {"zero_stage": stage})

    run_ranks(_record, 1, tmp_path / "model", tmp_path / "one", None)
    run_ranks(on_rank, 2)
    for stage in (2, 1):
        result = compare_recordings(tmp_path / "one", tmp_path / f"ranks{stage}")
        assert result.first is None and result.compared > 50, str(result)


def test_step_memory_is_measured_by_one_callback_per_step(tmp_path):
    def train(name, *callbacks):
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
        rows = [{"input_ids": [place] * 8, "labels": [place] * 8} for place in range(8)]
        settings = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": "none", "save_strategy": "no"}
        arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, **settings)
        Trainer(model, arguments, default_data_collator, rows, callbacks=list(callbacks)).train()

    def on_rank():
        def make_run(name):
            return RunCallback(tmp_path / name, memory_step=1, trace_step=None)

        message = r"already recorded\. Remove MemoryCallback if RunCallback is used, or give it other steps\."
        with pytest.raises(ConfigError, match=message):
            train("both", make_run("both"), MemoryCallback(tmp_path / "rejected", [1]))
        train("one", make_run("one"))
        train("other", make_run("other"), MemoryCallback(tmp_path / "memory", [2]))

    run_ranks(on_rank, 2)
    first, second = memory_in(tmp_path / "memory" / "step2")
    assert (first.rows, first.length) == (second.rows, second.length) == (2, 8)
    for name in ("one", "other"):
        assert len(memory_in(tmp_path / name / "memory")) == 2


def test_timeline_is_recorded_during_a_step():
    ids = torch.arange(32).view(4, 8)

    def on_rank():
        config = MegatronConfig(pp_size=2, num_microbatches=2)
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=config).train()
        state, recorder = parallel_state(model), SpanRecorder()
        shares = []
        for is_on in (False, True):
            state.pipeline.recorder = recorder if is_on else None
            model(input_ids=ids, labels=ids).loss.backward()
            timeline = gather_timeline(recorder, state.mesh.pp_group, **state.pipeline.describe())
            if is_on:
                shares.append(bubble_share(timeline))
            else:
                with pytest.raises(ConfigError, match=r"Keep the recorder on during a step\."):
                    bubble_share(timeline)
        return shares

    for [share] in run_ranks(on_rank, 2):
        assert 0 <= share < 1

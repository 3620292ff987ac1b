"""Tests of rank predictions: a schedule simulated from a few measured actions matches a run of all microbatches."""

import json
import re
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from typer.testing import CliRunner

from hf_megatron import ConfigError, MegatronConfig
from hf_megatron.cli import app
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.pipeline_parallel.schedules import SCHEDULES
from hf_megatron.planner import action_memory
from hf_megatron.planner.predicted_step import dry_run
from hf_megatron.planner.rank_classes import group_ranks
from hf_megatron.planner.rank_predictions import predict_ranks
from hf_megatron.planner.report import as_text
from hf_megatron.planner.truncated_model import shorten
from tests.integration.planner.test_fake_world import llama

MICROBATCHES, TOKENS = 8, 128


def run_all_microbatches(config, layout, world_size):
    ranks = [rank * layout.tp_size for rank in range(layout.pp_size)]
    return dry_run(config, layout, ranks, world_size, batch_size=layout.num_microbatches, sequence_length=TOKENS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_peak_matches_full_run(schedule):
    layout = MegatronConfig(pp_size=2, num_microbatches=MICROBATCHES, pipeline_schedule=schedule)
    predictions = predict_ranks(llama(), layout, 4, sequence_length=TOKENS)
    for rank, run in zip(predictions, run_all_microbatches(llama(), layout, 4), strict=True):
        assert rank.kept == {name: size for name, size in run.kept.items() if name != "forward"}
        assert rank.peak.size == pytest.approx(run.peak, rel=1e-4)
        assert rank.collectives == run.collectives


class UnevenConfig(LlamaConfig):
    model_type = "uneven_llama"
    widths: tuple[int, ...] = (64, 64, 128, 64)


class UnevenLlama(LlamaForCausalLM):
    """Model with per-layer widths, like OpenELM and DeciLM on the Hub."""

    config_class = UnevenConfig

    def __init__(self, config):
        super().__init__(config)
        for layer, width in zip(self.model.layers, config.widths, strict=True):
            layer.mlp = LlamaMLP(LlamaConfig(**config.to_dict() | {"intermediate_size": width}))


def test_layers_with_other_sizes_form_another_kind():
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    layout = MegatronConfig(pp_size=4, pipeline_partition=(1, 1, 1, 1))

    def on_rank():
        # In a fork: other tests iterate over all registered types.
        AutoModelForCausalLM.register(UnevenConfig, UnevenLlama)
        short = shorten(UnevenConfig(**sizes, vocab_size=64))
        return group_ranks(UnevenConfig(**sizes, vocab_size=64), layout), short.layers

    [(kinds, layers)] = run_ranks(on_rank, 1)
    assert kinds == [[0], [1], [2], [3]]
    assert layers == (0, 0, 2, 0)
    assert group_ranks(LlamaConfig(**sizes, vocab_size=64), layout) == [[0], [1, 2], [3]]


def test_identical_stages_share_one_run():
    layout = MegatronConfig(tp_size=2, sequence_parallel=True, pp_size=4, num_microbatches=MICROBATCHES)
    config = llama(tie_word_embeddings=True)
    assert group_ranks(config, replace(layout, pipeline_partition=(1, 1, 1, 1))) == [[0], [1, 2], [3]]
    layout = replace(layout, pipeline_partition=(1, 1, 1, 1))
    predictions = predict_ranks(config, layout, 16, sequence_length=TOKENS)
    run = run_all_microbatches(config, layout, 16)
    assert [rank.kind for rank in predictions] == [0, 1, 1, 2]
    assert predictions[1].peak.size > predictions[2].peak.size
    for rank, figures in zip(predictions, run, strict=True):
        assert rank.peak.size == pytest.approx(figures.peak, rel=1e-4)
        assert rank.collectives == figures.collectives


@pytest.mark.parametrize("microbatches", [1, 3])
def test_few_microbatches_match_full_run(microbatches):
    layout = MegatronConfig(pp_size=2, num_microbatches=microbatches)
    predictions = predict_ranks(llama(), layout, 2, sequence_length=TOKENS)
    assert [rank.peak.size for rank in predictions] == [
        figures.peak for figures in run_all_microbatches(llama(), layout, 2)
    ]


def test_job_without_pipeline_has_one_kind():
    [rank] = predict_ranks(llama(), MegatronConfig(tp_size=2, zero_stage=1), 8, sequence_length=TOKENS)
    [run] = dry_run(llama(), MegatronConfig(tp_size=2, zero_stage=1), [0], 8, batch_size=1, sequence_length=TOKENS)
    assert (rank.peak.size, rank.collectives) == (run.peak, run.collectives)


def test_retained_gradients_raise_peak(monkeypatch):
    layout = MegatronConfig(pp_size=2, num_microbatches=MICROBATCHES)
    right = predict_ranks(llama(), layout, 2, sequence_length=TOKENS)
    hand_back, retained_gradients = action_memory.Execution._hand_back, []

    def keep(self, cell, inputs):
        hand_back(self, cell, inputs)
        retained_gradients.append(self._buffers.gradients[cell[0] - 1, cell[1]])

    monkeypatch.setattr(action_memory.Execution, "_hand_back", keep)
    wrong = predict_ranks(llama(), layout, 2, sequence_length=TOKENS)
    # bf16 gradients of the hidden states of all microbatches but the one at the peak.
    more = wrong[1].peak.size - right[1].peak.size
    assert more == pytest.approx((MICROBATCHES - 1) * TOKENS * 128 * 2, rel=0.2)


def test_invalid_sizes_raise():
    with pytest.raises(ConfigError, match=r"sequence_length = 2000: GPT2LMHeadModel has 1024 positions"):
        predict_ranks(GPT2Config(), MegatronConfig(tp_size=2), 2, sequence_length=2000)
    with pytest.raises(ConfigError, match="does not divide the job's 3 ranks"):
        predict_ranks(llama(), MegatronConfig(tp_size=2), 3, sequence_length=TOKENS)


def test_table_lists_kinds_peaks_and_host_syncs():
    layout = MegatronConfig(pp_size=2, num_microbatches=MICROBATCHES)
    text = as_text(predict_ranks(llama(), layout, 4, sequence_length=TOKENS), layout, device_gib=80)
    assert "2 pipeline ranks of 2 kinds" in text
    assert re.search(r"\d backward of stage 0, microbatch \d\n", text)
    assert "fits in 80 GiB" in text
    assert "optimizer step: _local_scalar_dense in hf_megatron." in text


def test_command_prints_every_rank(tmp_path):
    llama().save_pretrained(tmp_path)
    words = ["dry-run", str(tmp_path), "--num-gpus", "8", "--seq-length", "64", "--json"]
    result = CliRunner().invoke(app, [*words, "--layout", "tp2+pp2+mb8"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout[result.stdout.index("[\n") :])
    assert [row["pipeline_rank"] for row in rows] == [0, 1]
    assert rows[0]["collectives"]["mesh_pp send"]["calls"] == MICROBATCHES
    error_result = CliRunner().invoke(app, [*words, "--layout", "tp2+pp2,tp4"])
    assert error_result.exit_code == 2

"""Tests of expert shards with widths that torch's grouped GEMM does not support."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hf_megatron import ConfigError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallel_state import parallel_state
from tests.helpers.dp_training import parse_layout
from tests.helpers.training import PatternRuns

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}


def save_mixtral(path, width):
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=width, num_local_experts=4)).save_pretrained(path)


def save_qwen3_moe(path, width):
    config = Qwen3MoeConfig(**SIZES, intermediate_size=48, moe_intermediate_size=width, num_experts=4, head_dim=8)
    Qwen3MoeForCausalLM(config).save_pretrained(path)


@pytest.mark.parametrize(
    ("made", "width", "dtype", "error"),
    [
        (
            save_mixtral,
            40,
            torch.float32,
            r"width 40 \(config.intermediate_size\) and a rank's shard 10.*multiple of 4.*\[1, 2\]",
        ),
        (
            save_mixtral,
            48,
            torch.bfloat16,
            r"width 48 \(config.intermediate_size\) and a rank's shard 12.*multiple of 8",
        ),
        (save_qwen3_moe, 40, torch.float32, r"width 40 \(config.moe_intermediate_size\) and a rank's shard 10"),
        (save_qwen3_moe, 48, torch.float32, None),
    ],
)
def test_expert_widths_are_checked_before_loading(tmp_path, made, width, dtype, error):
    made(tmp_path, width)

    def load():
        if error is not None:
            with pytest.raises(ConfigError, match=error):
                AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, megatron_config=parse_layout("tp4"))
            return
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, megatron_config=parse_layout("tp4"))
        ids = torch.arange(18).view(2, 9)
        model(input_ids=ids, labels=ids).loss.backward()
        # The cast halves the bytes per matrix row, so a multiple of 8 is required.
        with pytest.raises(ConfigError, match="multiple of 8 with torch.bfloat16"):
            model.bfloat16()(input_ids=ids)
        model.set_experts_implementation("eager")
        model(input_ids=ids)

    run_ranks(load, 4)


@pytest.mark.parametrize("product", ["eager", "batched_mm"])
def test_suggested_implementations_match_single_process(tmp_path, product):
    save_mixtral(tmp_path, 40)

    def steps(loop):
        if parallel_state(loop.model) is not None:
            cure = r"Load the model with experts_implementation='eager' or 'batched_mm', or with a tp_size in \[1, 2\]."
            with pytest.raises(ConfigError, match=cure):
                AutoModelForCausalLM.from_pretrained(loop.path, megatron_config=parse_layout("tp4"))
        loop.step(0)
        loop.step(1)

    PatternRuns(tmp_path, {"steps": steps}, experts_implementation=product).compare("tp4", "steps")

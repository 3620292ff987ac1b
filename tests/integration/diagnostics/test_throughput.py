"""Tests of the throughput and MFU that Trainer logs, and of the FLOP estimate against torch's counter."""

import time

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    LlamaConfig,
    Qwen3MoeConfig,
    T5Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.diagnostics.throughput import Throughput, estimate_model_work
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.throughput import ThroughputCallback
from hf_megatron.planner.devices import device
from hf_megatron.planner.job import Job
from hf_megatron.planner.truncated_model import shorten
from hf_megatron.planner.unit_cost_cache import UnitCostCache

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024, "hidden_size": 256}
LLAMA = LlamaConfig(**SIZES, intermediate_size=512, num_hidden_layers=4, tie_word_embeddings=True)
CONFIGS = {
    "llama": LLAMA,
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, head_dim=64
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 8},
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_match_torch_counter(name):
    length = 512
    cost_cache = UnitCostCache(shorten(CONFIGS[name]), Job(1, device("h100"), length, 1))
    cost_cache.measure({1}, {1}, {None})
    costs = cost_cache.costs(MegatronConfig())
    units = [costs.before, *(costs.layers[number] for number in cost_cache.short.layers), costs.after]
    forward, backward = (
        sum(sum(work.matmuls.values()) + work.attention for work in works)
        for works in ([unit.forward for unit in units], [unit.backward for unit in units])
    )
    flops = estimate_model_work(CONFIGS[name]).flops(1, length)
    assert flops == pytest.approx(forward, rel=0.02)
    assert 3 * flops == pytest.approx(forward + backward, rel=0.06)


def test_sliding_windows_and_unsupported_models():
    config = LlamaConfig(**SIZES, intermediate_size=512, num_hidden_layers=2)
    full_attention = estimate_model_work(config)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 16
    half = estimate_model_work(config)
    assert half.per_pair == full_attention.per_pair / 2
    pairs, tokens = 256 * 256 / 2, 256
    assert full_attention.flops(1, 256) - half.flops(1, 256) == 2 * half.per_pair * (pairs - tokens * 16)
    assert estimate_model_work(T5Config(num_layers=2, d_model=32, d_ff=64)) is None
    masked = BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        architectures=["BertForMaskedLM"],
    )
    assert estimate_model_work(masked) is None


def test_frozen_weights_skip_weight_gradients():
    model = AutoModelForCausalLM.from_config(LLAMA).train()
    ids = torch.zeros(2, 16, dtype=torch.int64)
    throughput, metrics = Throughput(model), {}
    model(input_ids=ids)
    throughput.end_step()
    metrics["whole"] = throughput.take(1.0)
    model.requires_grad_(False)
    model(input_ids=ids)
    model.eval()(input_ids=ids)
    throughput.end_step()
    metrics["frozen"] = throughput.take(1.0)
    # Both steps have the same tokens; evaluation counts none.
    ratio = [metrics[name]["mfu"] / metrics[name]["tokens_per_second"] for name in ("whole", "frozen")]
    assert ratio[0] / ratio[1] == pytest.approx(3 / 2)
    assert metrics["whole"]["mfu"] == pytest.approx(metrics["whole"]["tflops_per_device"])
    assert throughput.take() == {}


class Reporting(TrainerCallback):
    """A reporting callback, which Trainer calls before user callbacks."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))

    def on_evaluate(self, args, state, control, **kwargs):
        time.sleep(1.0)


def _train_on_rank(folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
    rows = [{"input_ids": [place] * 64, "labels": [place] * 64} for place in range(8)]
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": "none", "save_strategy": "no"}
    settings |= {"logging_steps": 1, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    arguments = TrainingArguments(str(folder), use_cpu=True, **settings)
    reporting = Reporting()
    trainer = Trainer(
        model,
        arguments,
        default_data_collator,
        rows,
        rows[:2],
        callbacks=[reporting, ThroughputCallback(peak_tflops=0.01)],
    )
    began = time.monotonic()
    trainer.train()
    return reporting.seen, trainer.state.log_history, time.monotonic() - began


def test_trainer_logs_throughput(tmp_path):
    (callback_logs, history, elapsed), _ = run_ranks(lambda: _train_on_rank(tmp_path), 2)
    logs = [one for one in callback_logs if "loss" in one]
    assert len(logs) == 3
    assert [one["mfu"] for one in logs] == [one["mfu"] for one in history if "loss" in one]
    for one in logs:
        assert one["tokens_per_second"] == pytest.approx(2 * one["tokens_per_second_per_device"], rel=1e-3)
        assert one["mfu"] == pytest.approx(100 * one["tflops_per_device"], rel=1e-2)
    # Two microbatches of two samples of 64 tokens; the sleeps during evaluation belong to no step.
    seconds = [256 / one["tokens_per_second"] for one in logs]
    assert 0 < sum(seconds) < elapsed - 2.9
    assert all("mfu" not in one for one in callback_logs if "loss" not in one)


def test_invalid_peak_tflops():
    with pytest.raises(ConfigError, match="peak_tflops=0"):
        ThroughputCallback(peak_tflops=0)

"""Tests of the fake world: predictions match real gloo ranks, and cover jobs larger than the machine."""

import re

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3MoeConfig,
    XGLMConfig,
)

from benchmarks.measured_step import measure_step
from hf_megatron import ConfigError, MegatronConfig, RankError
from hf_megatron.core.communication.watchdog import running_watch
from hf_megatron.data_parallel import buckets, distributed_optimizer, param_gather
from hf_megatron.data_parallel.bucket_assignment import default_capacity
from hf_megatron.expert_parallel.token_dispatcher import AllToAll
from hf_megatron.pipeline_parallel import train_step
from hf_megatron.pipeline_parallel.schedules import SCHEDULES
from hf_megatron.planner.fake_world import run_fake_ranks
from hf_megatron.planner.predicted_step import dry_run, require_lengths
from hf_megatron.planner.uniform_routing import even_choices, even_sizes


def llama(layers=4, **changes):
    return LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=8,
        use_cache=False,
        **{"num_key_value_heads": 8, "tie_word_embeddings": False, **changes},
    )


BATCH = {"batch_size": 4, "sequence_length": 64}
EXPERTS = Qwen3MoeConfig(
    **{"vocab_size": 512, "hidden_size": 128, "moe_intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
)
FLAT = {"pp_size": 2, "num_microbatches": 4}
# Layout, relative tolerance of the peak against the allocator: gloo frees some buffers late.
COMPARED = {
    "tp2": ({"tp_size": 2}, 2e-2),
    "tp2+sp": ({"tp_size": 2, "sequence_parallel": True}, 5e-2),
    "tp2+sp, full": ({"tp_size": 2, "sequence_parallel": True, "recompute": "full"}, 5e-2),
    "tp2+sp, selective": ({"tp_size": 2, "sequence_parallel": True, "recompute": "selective"}, 5e-2),
    "cp2": ({"cp_size": 2}, 5e-2),
    "ep2": ({"dp_size": 2, "ep_size": 2}, 5e-2),
    **{f"pp2, {name}": ({**FLAT, "pipeline_schedule": name}, 5e-2) for name in SCHEDULES},
    "dp2, stage 0": ({"zero_stage": 0}, 1e-3),
    "dp2": ({"zero_stage": 1}, 1e-3),
    "dp2, stage 2": ({"zero_stage": 2}, 1e-3),
    "dp2, stage 3": ({"zero_stage": 3}, 1e-3),
}


def make_job(layout, dtype=torch.bfloat16):
    return {"config": EXPERTS if "ep_size" in layout else llama(), "layout": MegatronConfig(**layout), "dtype": dtype}


def predict_step(layout, rank=0, ranks=2, dtype=torch.bfloat16, **kwargs):
    [figures] = dry_run(**make_job(layout, dtype), **BATCH, ranks=[rank], world_size=ranks, **kwargs)
    return figures


def predict_and_measure(layout, ranks):
    """Yields predicted and measured figures of the first and last rank."""
    # Expert matmuls on fake tensors require bf16.
    dtype = torch.bfloat16 if "ep_size" in layout else torch.float32
    results = measure_step(**make_job(layout, dtype), **BATCH, world_size=ranks)
    for rank in {0, ranks - 1}:
        yield predict_step(layout, rank, ranks, dtype, as_gloo=True), results[rank]


def select_tensor_collectives(figures):
    """Returns the collectives without the object broadcasts between pipeline ranks at the end of a step."""
    return {key: value for key, value in figures.collectives.items() if key[1] != "broadcast"}


@pytest.mark.parametrize(("layout", "limit"), COMPARED.values(), ids=COMPARED)
def test_prediction_matches_gloo_ranks(layout, limit):
    for figures, measured in predict_and_measure(layout, 2):
        assert {name: figures.kept.get(name) for name in measured.kept} == measured.kept
        assert figures.dynamic_peak == pytest.approx(measured.dynamic_peak, rel=limit)
        assert select_tensor_collectives(figures) == select_tensor_collectives(measured)


FOUR = {
    "tp2, dp2": {"tp_size": 2, "sequence_parallel": True},
    "tp2, pp2": {"tp_size": 2, **FLAT},
    "cp2, dp2": {"cp_size": 2},
    "dp4, ep2": {"dp_size": 4, "ep_size": 2},
    "tp2, dp2, ep4": {"tp_size": 2, "sequence_parallel": True, "dp_size": 2, "ep_size": 4},
    "dp4, stage 3": {"zero_stage": 3},
}


@pytest.mark.parametrize("layout", FOUR.values(), ids=FOUR)
def test_collectives_match_four_ranks(layout):
    for figures, measured in predict_and_measure(layout, 4):
        assert select_tensor_collectives(figures) == select_tensor_collectives(measured)


def test_missing_collective_is_detected(monkeypatch):
    layout = FOUR["dp4, ep2"]
    [(figures, _), _] = predict_and_measure(layout, 4)
    monkeypatch.setattr(AllToAll, "exchange_sizes", lambda self, sizes, chosen: None)
    assert select_tensor_collectives(predict_step(layout, 0, 4, as_gloo=True)) != select_tensor_collectives(figures)


@pytest.mark.parametrize(("tokens", "choices", "experts", "ranks"), [(64, 2, 8, 4), (96, 8, 128, 8), (60, 3, 8, 2)])
def test_experts_are_chosen_evenly(tokens, choices, experts, ranks):
    chosen = torch.from_numpy(even_choices(tokens, choices, experts))
    assert all(len(set(row.tolist())) == choices for row in chosen)
    counts = chosen.flatten().bincount(minlength=experts)
    assert counts.max() - counts.min() <= 1
    table = even_sizes(tokens, choices, experts // ranks, ranks, ranks - 1)
    assert sum(row[1] for row in table) == tokens * choices
    assert all(row[0] <= min(tokens, row[1]) for row in table)
    assert len({tuple(row[2:]) for row in table}) == 1


@pytest.mark.parametrize(("as_gloo", "limits"), [(False, (1.8, 2.2)), (True, (3.0, 4.0))], ids=["gpu", "cpu"])
def test_narrow_value_attention_writes_no_scores_on_gpu(as_gloo, limits):
    """Memory grows linearly with tokens, on a CPU quadratically."""
    config = DeepseekV3Config(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "v_head_dim": 16},
        **{"first_k_dense_replace": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 32},
        **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_group": 1},
    )
    short, long = (
        dry_run(config, MegatronConfig(tp_size=2), [0], 2, batch_size=1, sequence_length=tokens, as_gloo=as_gloo)[0]
        for tokens in (2048, 4096)
    )
    least, most = limits
    assert least < long.dynamic_peak / short.dynamic_peak < most


@pytest.mark.parametrize(
    ("heads", "dtype", "writes"), [(8, torch.float32, False), (4, torch.float32, True), (4, torch.bfloat16, False)]
)
def test_shared_fp32_heads_write_scores_on_gpu(heads, dtype, writes):
    """The fp32 CUDA kernel does not support grouped-query heads, as measured on a GPU."""
    config, tokens = llama(num_key_value_heads=heads), 2048
    [figures] = dry_run(config, MegatronConfig(tp_size=2), [0], 2, batch_size=1, sequence_length=tokens, dtype=dtype)
    scores = tokens * tokens * config.num_attention_heads // 2 * dtype.itemsize
    layer_bytes = max(sum(causes.values()) for causes in figures.layers.values())
    assert (layer_bytes > scores) == writes


def test_half_precision_memory_matches_gloo_ranks():
    figures = predict_step({"zero_stage": 1}, as_gloo=True)
    measured = measure_step(llama(), MegatronConfig(zero_stage=1), 2, **BATCH)[0]
    assert {name: figures.kept.get(name) for name in measured.kept} == measured.kept
    assert {"weights", "main weights", "moments", "gradients"} <= measured.kept.keys()


# Bytes per parameter without activations: weights 2, gradients 4, main weights and moments 12 / ranks.


def get_bytes_per_parameter(ranks=4):
    return sum(predict_step({"zero_stage": 1}, ranks=ranks).per_parameter.values())


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_zero1_memory_is_within_megatron(ranks):
    # Buffer segments are padded and end with a flag per parameter.
    assert get_bytes_per_parameter(ranks) <= (6 + 12 / ranks) * 1.01


def test_zero3_keeps_its_shard_per_parameter():
    """Regression: bytes were divided by local parameters, which made 2 bytes of weights for any number of ranks."""
    replicated, split = (predict_step({"zero_stage": stage}, ranks=4) for stage in (1, 3))
    assert split.parameters == replicated.parameters
    assert split.per_parameter["weights"] == pytest.approx(2 / 4, rel=1e-3)
    assert sum(split.per_parameter.values()) == pytest.approx((2 + 12) / 4, rel=0.01)
    assert predict_step({"tp_size": 2, "zero_stage": 3}, ranks=4).parameters < 0.6 * replicated.parameters


def keep_gathered_weights(monkeypatch):
    receive = param_gather._receive

    def keep(bucket, gather, parts):
        buffer = bucket.rows
        receive(bucket, gather, parts)
        bucket.rows = buffer

    monkeypatch.setattr(param_gather, "_receive", keep)


def keep_reduction_buffer(monkeypatch):
    monkeypatch.setattr(buckets.Bucket, "own_segment", lambda self, *, keep: self.take_recv_buffer()[:1])


def keep_last_weights(monkeypatch):
    publish = distributed_optimizer.ShardedOptimizer.publish

    def keep(self, moved):
        self.copies = [leaf.view().clone() for leaf in self.leaves]
        publish(self, moved)

    monkeypatch.setattr(distributed_optimizer.ShardedOptimizer, "publish", keep)


@pytest.mark.parametrize("fault", [keep_gathered_weights, keep_reduction_buffer, keep_last_weights])
def test_second_copy_is_detected(fault, monkeypatch):
    fault(monkeypatch)
    assert get_bytes_per_parameter() > (6 + 12 / 4) * 1.04


@pytest.mark.parametrize("pairwise", [True, False])
def test_bucket_size_grows_with_ranks(pairwise):
    sizes = [default_capacity(ranks, torch.float32, pairwise=pairwise) for ranks in (2, 40, 128)]
    assert sizes == ([2**25] * 3 if pairwise else [160_000_000, 160_000_000, 512_000_000])


# The host syncs with its device once per step, to read whether all gradients are finite.

WAITING = {
    "tp2+sp": ({"tp_size": 2, "sequence_parallel": True}, 2),
    "tp2, chunked loss": ({"tp_size": 2, "loss_chunk_size": 64}, 2),
    "dp2": ({"zero_stage": 1}, 2),
    "dp2, chunked loss": ({"zero_stage": 1, "loss_chunk_size": 64}, 2),
    "dp2, clipped": ({"zero_stage": 2, "gradient_clipping": 1.0}, 2),
    "pp2": ({"pp_size": 2, "num_microbatches": 4}, 2),
    "pp2, chunked loss": ({"pp_size": 2, "num_microbatches": 4, "loss_chunk_size": 64}, 2),
    "pp2 zbv": ({"pp_size": 2, "num_microbatches": 4, "pipeline_schedule": "zbv"}, 2),
    "tp2+sp, pp2, dp2": ({"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2}, 8),
}


def list_host_syncs(layout, rank, ranks):
    return [
        (read.moment, read.where[:2]) for read in predict_step(layout, rank, ranks).get_package_reads("hf_megatron")
    ]


@pytest.mark.parametrize(("layout", "ranks"), WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("last", [False, True], ids=["first rank", "last rank"])
def test_host_syncs_once_per_step(layout, ranks, last):
    reads = list_host_syncs(layout, ranks - 1 if last else 0, ranks)
    assert [moment for moment, _ in reads] == ["optimizer step"], reads


def test_extra_host_sync_is_detected(monkeypatch):
    monkeypatch.setattr(train_step, "is_async_device", lambda device: False)
    reads = list_host_syncs({"pp_size": 2, "num_microbatches": 4}, 0, 2)
    assert [moment for moment, _ in reads] == ["backward", "optimizer step"]


@pytest.mark.parametrize("inputs", [("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")])
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 4}], ids=["tp2", "pp2"])
def test_masks_and_positions_are_read_once_per_call(layout, inputs):
    """The library reads them, not transformers, which would read them in each microbatch."""
    figures = predict_step(layout, 1, inputs=inputs)
    assert [read.moment for read in figures.reads] == ["forward", "optimizer step"]
    assert figures.get_package_reads("hf_megatron") == figures.reads


# Ranks of jobs larger than the machine


def test_large_job_stages():
    layout = MegatronConfig(tp_size=8, sequence_parallel=True, pp_size=4, num_microbatches=4)
    first, last = dry_run(llama(8), layout, [0, 24], 1024, **BATCH)
    groups = {group for group, _ in first.collectives}
    assert {"mesh_tp", "mesh_pp", "mesh_dp_shard"} <= groups
    # A stage holds one microbatch per stage from it to the last; the last stage holds one.
    assert len(first.layers) == len(last.layers) == 2 * 4
    assert first.at_peak["activations of layers"] > 3 * last.at_peak["activations of layers"]
    assert first.collectives["mesh_pp", "send"] == last.collectives["mesh_pp", "recv"]


def test_recomputed_layers_keep_their_input():
    layout = {"tp_size": 2, "sequence_parallel": True}
    plain, recomputed = (predict_step(layout | more) for more in ({}, {"recompute": "full"}))
    sizes = [sum(figures.layers["model.layers.1", 0].values()) for figures in (plain, recomputed)]
    # [batch, tokens / ranks, hidden] in bf16.
    assert sizes[1] == 4 * 64 // 2 * 128 * 2 and sizes[0] > 10 * sizes[1]


def test_offloaded_inputs_use_no_device_memory():
    recomputed, offloaded = (
        predict_step({"tp_size": 2, "recompute": "full"} | more) for more in ({}, {"offload_activations": True})
    )
    # Inputs of all layers except the one being computed.
    assert recomputed.peak - offloaded.peak >= 3 * (4 * 64 * 128 * 2)


def test_no_watchdog_starts():
    assert run_fake_ranks(lambda world: running_watch(), [1], 4) == [None]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ranks": [2]}, r"expected some of 0 to 1"),
        ({"ranks": []}, r"expected some of 0 to 1"),
        ({"world_size": 1}, "expected 2 ranks or more"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"sequence_length": -3}, "sequence_length=-3"),
        ({"layout": MegatronConfig(tp_size=2, offload_optimizer=True)}, "offload_optimizer"),
        ({"layout": {"tp_size": 2}}, "expected a MegatronConfig"),
        ({"inputs": ["pixel_values"]}, "pixel_values"),
    ],
)
def test_invalid_arguments_raise(changes, match):
    arguments = {
        "layout": MegatronConfig(tp_size=2),
        "ranks": [0],
        "world_size": 2,
        "batch_size": 1,
        "sequence_length": 8,
    }
    with pytest.raises(ConfigError, match=match):
        dry_run(LlamaConfig(), **{**arguments, **changes})


def test_invalid_layout_raises():
    with pytest.raises(RankError, match="tp_size=3"):
        predict_step({"tp_size": 3})


SMALL = {"vocab_size": 64, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
LEARNED = {
    "GPT2LMHeadModel": (GPT2Config(n_positions=16, **SMALL), "transformer.wpe.weight"),
    "OPTForCausalLM": (
        OPTConfig(max_position_embeddings=16, ffn_dim=32, word_embed_proj_dim=32, **SMALL),
        "model.decoder.embed_positions.weight",
    ),
    "GPTJForCausalLM": (GPTJConfig(n_positions=16, rotary_dim=4, **SMALL), "transformer.h.0.attn.embed_positions"),
}


@pytest.mark.parametrize("named", LEARNED)
def test_tokens_beyond_position_table_raise(named):
    """Embedding lookups are not executed in a fake world, so lengths must be checked explicitly."""
    config, table = LEARNED[named]
    with pytest.raises(ConfigError, match=rf"sequence_length = 17: {named} has 16 positions \({re.escape(table)}\)"):
        dry_run(config, MegatronConfig(tp_size=2), [0], 2, batch_size=1, sequence_length=17)
    model = AutoModelForCausalLM.from_config(config)
    model(input_ids=torch.zeros(1, 16, dtype=torch.int64))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(max_position_embeddings=16, intermediate_size=32, **SMALL),
        BloomConfig(**SMALL),
        XGLMConfig(max_position_embeddings=16, ffn_dim=32, d_model=32, attention_heads=2, num_layers=1, vocab_size=64),
        GPT2Config(n_positions=17, **SMALL),
    ],
    ids=lambda config: config.model_type,
)
def test_supported_sequence_lengths_pass(config):
    AutoModelForCausalLM.from_config(config)(input_ids=torch.zeros(1, 17, dtype=torch.int64))
    require_lengths(config, 17, None)

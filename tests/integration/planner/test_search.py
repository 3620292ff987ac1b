"""Tests of the planner: closed-form estimates against the dry run, which matches real ranks, and layout search."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
import yaml
from transformers import (
    CONFIG_MAPPING,
    BartConfig,
    BertConfig,
    CLIPConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen3MoeConfig,
    T5Config,
    WhisperConfig,
    XLMConfig,
)
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.config import MegatronConfig
from hf_megatron.core.axes import Axes
from hf_megatron.data_parallel.memory_model import kept_bytes
from hf_megatron.errors import ConfigError, RankError
from hf_megatron.integrations.accelerate.launch_keys import LAUNCH_KEYS
from hf_megatron.planner.candidates import Bounds
from hf_megatron.planner.devices import device
from hf_megatron.planner.estimate import Estimator
from hf_megatron.planner.fake_world import run_fake_ranks
from hf_megatron.planner.job import Job
from hf_megatron.planner.local_parameters import plan_unit_parameters
from hf_megatron.planner.plan_output import launch_as_yaml, layout_as_yaml, plan_as_dict, plan_as_text, write_plan
from hf_megatron.planner.plan_plot import draw_plan
from hf_megatron.planner.predicted_step import StepSizes, dry_run, step_figures
from hf_megatron.planner.rank_predictions import predict_ranks
from hf_megatron.planner.search import search_layouts
from hf_megatron.planner.time_model import seconds
from hf_megatron.planner.training import Training
from hf_megatron.planner.truncated_model import shorten
from hf_megatron.planner.unit_cost_cache import UnitCostCache
from hf_megatron.planner.unit_costs import measure_units

LENGTH, DP = 512, 4
LLAMA = LlamaConfig(
    vocab_size=8000,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)
EXPERTS = Qwen3MoeConfig(
    vocab_size=8000,
    hidden_size=512,
    moe_intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    head_dim=64,
)
TIED = GPT2Config(n_layer=3, n_embd=256, n_head=8, vocab_size=1000, n_positions=LENGTH)
MASKED = BertConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=8,
    architectures=["BertForMaskedLM"],
)
ENCODER_DECODER = T5Config(
    vocab_size=1000, d_model=256, d_kv=32, d_ff=512, num_layers=4, num_decoder_layers=6, num_heads=8
)
SHIFTED = BartConfig(
    vocab_size=1000,
    d_model=256,
    encoder_layers=4,
    decoder_layers=4,
    encoder_ffn_dim=512,
    decoder_ffn_dim=512,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
)
# The vision encoder is allocated but receives no input.
IMAGES = Qwen2_5_VLConfig(
    text_config={
        "vocab_size": 8000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    },
    vision_config={"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 4, "out_hidden_size": 512},
    vision_start_token_id=1,
    vision_end_token_id=2,
    image_token_id=3,
    video_token_id=4,
)
# A device so small that several are needed to hold these models.
TINY = replace(device("h100"), name="tiny", memory_gib=0.25)


SIZES = [{"zero_stage": stage} for stage in range(4)] + [{"tp_size": 2}]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        *((config, sizes) for config in (LLAMA, EXPERTS, TIED) for sizes in SIZES),
        *((config, {"tp_size": 2}) for config in (MASKED, ENCODER_DECODER, SHIFTED, IMAGES)),
        (EXPERTS, {"tp_size": 2, "ep_size": 4}),
    ],
    ids=lambda value: "+".join(map(str, value.items())) if isinstance(value, dict) else value.model_type,
)
def test_kept_bytes_match_dry_run(config, sizes):
    layout = MegatronConfig(dp_size=DP, **sizes)
    short = shorten(config)
    held = plan_unit_parameters(short, layout, 2)
    parameters = [*held.before, *(one for layer in short.layers for one in held.layers[layer]), *held.after]
    for one in held.tied:
        parameters.remove(one)
    axes = Axes.of(layout, 0)
    shards = {name: axes.size(f"{name}_shard") for name in ("dp", "dp_cp", "edp")}
    [figures] = dry_run(config, layout, [0], DP * layout.ranks_per_replica, batch_size=1, sequence_length=128)
    expected = {name: size for name, size in figures.kept.items() if name != "forward"}
    assert Counter(kept_bytes(parameters, layout.zero_stage, shards)) + Counter(weights=held.buffers) == expected


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({"tp_size": 2, "sequence_parallel": True}, 0.03),
        ({"tp_size": 2, "sequence_parallel": True, "recompute": "full"}, 0.08),
        ({"tp_size": 2, "sequence_parallel": True, "recompute": "selective"}, 0.03),
        ({"zero_stage": 1}, 0.03),
        ({"zero_stage": 3}, 0.16),
        ({"tp_size": 2, "sequence_parallel": True, "pp_size": 4}, 0.05),
        ({"pp_size": 2, "pipeline_schedule": "interleaved_1f1b"}, 0.05),
        ({"pp_size": 2, "pipeline_schedule": "zbv"}, 0.09),
        ({"cp_size": 2}, 0.03),
    ],
    ids=lambda value: "+".join(map(str, value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=lambda config: config.model_type)
def test_memory_estimate_is_close_to_dry_run(config, sizes, limit):
    """Rounding errors are largest on models this small."""
    microbatches = 8 if "pp_size" in sizes else 1
    layout = MegatronConfig(dp_size=DP, num_microbatches=8 if "pp_size" in sizes else None, **sizes)
    cost_cache = UnitCostCache(
        shorten(config), Job(DP * layout.ranks_per_replica, device("h100"), LENGTH, DP * microbatches)
    )
    cost_cache.measure({layout.tp_size}, {1}, {layout.recompute})
    estimates = Estimator(cost_cache).memory.categories(layout, 1, microbatches)
    predicted = predict_ranks(config, layout, DP * layout.ranks_per_replica, sequence_length=LENGTH)
    for rank, expected in zip(estimates, predicted, strict=True):
        assert sum(rank.values()) == pytest.approx(expected.peak.size, rel=limit)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        *((config, {"tp_size": 2}) for config in (MASKED, ENCODER_DECODER, SHIFTED, IMAGES)),
        *((config, {"pp_size": 2}) for config in (MASKED, IMAGES)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.model_type,
)
def test_memory_estimate_for_other_architectures(config, sizes):
    """Covers encoders, encoder-decoders with another target length, and a vision-language model on text."""
    microbatches = 8 if "pp_size" in sizes else 1
    target = 128 if config.is_encoder_decoder else None
    layout = MegatronConfig(
        dp_size=2, sequence_parallel="tp_size" in sizes, num_microbatches=8 if "pp_size" in sizes else None, **sizes
    )
    short = shorten(config)
    assert len(short.names) < len(short.layers)
    cost_cache = UnitCostCache(short, Job(4, device("h100"), LENGTH, 2 * microbatches, target_length=target))
    cost_cache.measure({layout.tp_size}, {1}, {None})
    estimates = Estimator(cost_cache).memory.categories(layout, 1, microbatches)
    predicted = predict_ranks(config, layout, 4, sequence_length=LENGTH, target_length=target)
    for rank, expected in zip(estimates, predicted, strict=True):
        assert sum(rank.values()) == pytest.approx(expected.peak.size, rel=0.06)


TRAINED = {
    "lora": Training(lora_rank=8),
    "frozen": Training(frozen=("embed_tokens", r"layers\.[0-2]\.")),
    "frozen norms": Training(frozen=("norm",)),
}


@pytest.mark.parametrize("training", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("sizes", [{"tp_size": 2, "sequence_parallel": True}, {"zero_stage": 0}], ids=["tp2", "dp4"])
def test_trainable_parameters_determine_memory(training, sizes):
    layout = MegatronConfig(dp_size=DP, **sizes)
    ranks = DP * layout.ranks_per_replica
    cost_cache = UnitCostCache(shorten(LLAMA, training), Job(ranks, device("h100"), LENGTH, DP, training=training))
    cost_cache.measure({layout.tp_size}, {1}, {None})
    [estimate] = Estimator(cost_cache).memory.categories(layout, 1, 1)

    def on_rank(world):
        return step_figures(world, LLAMA, layout, StepSizes(1, LENGTH), adapt=training.adapt)

    [figures] = run_fake_ranks(on_rank, [0], ranks)
    names = ("weights", "main weights", "moments")
    buffers = sum(buffer.nbytes for buffer in cost_cache.short.model.buffers())
    expected = Counter(figures.kept)
    expected["weights"] -= buffers
    assert {name: estimate[name] for name in names} == {name: expected[name] for name in names}
    assert sum(estimate.values()) == pytest.approx(figures.peak, rel=0.06)


def test_frozen_first_layers_have_no_backward():
    training = TRAINED["frozen"]
    cost_cache = UnitCostCache(shorten(LLAMA, training), Job(8, device("h100"), LENGTH, 8, training=training))
    assert len({*cost_cache.short.layers}) == 3
    cost_cache.measure({1}, {1}, {None})
    frozen, _, first, trained = (cost_cache.costs(MegatronConfig(dp_size=8)).layers[layer] for layer in (0, 1, 3, 4))
    assert frozen.backward.flops == 0 and frozen.forward_growth < trained.forward_growth / 4
    # Its norm is trainable, which needs all gradients except the one of its input.
    assert 0 < first.backward.flops == trained.backward.flops and first.backward.moved < trained.backward.moved


def test_quantized_sizes_match_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(96, 160)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4")
    assert Training(8, quantized="nf4").code_bytes(96, 160) == codes.nbytes + state.absmax.nbytes
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    assert Training(8, quantized="int8").code_bytes(96, 160) == codes.nbytes + scales.nbytes
    job = Job(8, device("h100"), LENGTH, 8)
    peaks = {}
    for name in (None, "nf4"):
        coded = replace(job, training=Training(8, quantized=name))
        cost_cache = UnitCostCache(shorten(LLAMA, coded.training), coded)
        cost_cache.measure({1}, {1}, {None})
        estimate = Estimator(cost_cache).estimate(MegatronConfig(dp_size=8), 1, 1)
        peaks[name] = estimate.memory[0]["weights"], estimate.compute
    linears = sum(p.numel() for name, p in cost_cache.short.model.named_parameters() if "_proj" in name) // 2 * 8
    assert peaks[None][0] - peaks["nf4"][0] == linears * 2 - linears // 2 - linears // 16
    assert peaks["nf4"][1] > peaks[None][1]


def test_packing_and_offloading_change_costs():
    # A model this small is bound by kernel launches.
    job = Job(8, replace(device("h100"), launch_us=1e-6), LENGTH, 8)
    cost_cache = UnitCostCache(shorten(LLAMA), job)
    cost_cache.measure({1}, {1}, {None})
    packed = UnitCostCache(cost_cache.short, replace(job, document_length=LENGTH / 4))
    packed._costs = cost_cache._costs
    layout = MegatronConfig(dp_size=8)
    unpacked, short = (Estimator(one).estimate(layout, 1, 1) for one in (cost_cache, packed))
    assert short.compute < unpacked.compute and short.memory == unpacked.memory
    offloaded = Estimator(cost_cache).estimate(replace(layout, offload_optimizer=True), 1, 1)
    assert not {"main weights", "moments"} & offloaded.memory[0].keys()
    assert offloaded.seconds > unpacked.seconds
    with pytest.raises(ConfigError, match="document_length = 1000: expected 1 to 512"):
        replace(job, document_length=1000)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rank": -1}, "Training.lora_rank = -1: expected 0 or more"),
        ({"lora_rank": 8, "quantized": "nf3"}, "Training.quantized = 'nf3': expected one of nf4, int8"),
        ({"quantized": "nf4"}, "cannot be trained. Set lora_rank"),
        ({"frozen": ("(",)}, "not a valid regular expression"),
    ],
)
def test_invalid_training_raises(values, message):
    with pytest.raises(ConfigError, match=message):
        Training(**values)


def test_lora_without_peft_raises(monkeypatch):
    monkeypatch.setattr("hf_megatron.planner.training.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install peft"):
        Training(lora_rank=8)


def test_quantized_weights_exclude_zero3():
    bounds = Bounds(recomputes=(None,), fixed={"tp_size": 1, "cp_size": 1, "pp_size": 1})
    job = Job(8, device("h100"), LENGTH, 64)
    coded = search_layouts(LLAMA, replace(job, training=Training(8, quantized="nf4")), bounds)
    assert any(reason.startswith("zero 3: nf4 codes") for reason in coded.reasons)
    assert coded.considered < search_layouts(LLAMA, replace(job, training=Training(8)), bounds).considered


@pytest.mark.parametrize(
    ("pattern", "message"), [("nowhere", "no parameter of LlamaForCausalLM"), (".", "no trainable parameter")]
)
def test_invalid_frozen_patterns_raise(pattern, message):
    with pytest.raises(ConfigError, match=message):
        shorten(LLAMA, Training(frozen=(pattern,)))


def test_recomputed_layer_cost_matches_measurement():
    short = shorten(LLAMA)
    layouts = [MegatronConfig(tp_size=2, sequence_parallel=True, dp_size=2, recompute=how) for how in (None, "full")]
    plain, measured = measure_units(short, layouts, StepSizes(1, LENGTH))
    hidden = LENGTH * LLAMA.hidden_size * 2 // 2
    predicted, expected = plain.recomputed(hidden).layers[0], measured.layers[0]
    assert predicted.forward_growth == expected.forward_growth == hidden
    assert predicted.forward == expected.forward
    # torch stops recomputation after the last tensor needed by backward and skips the rest of the layer.
    assert 1.0 <= predicted.backward.flops / expected.backward.flops < 1.1
    assert predicted.backward.traffic["tp"] == pytest.approx(expected.backward.traffic["tp"], rel=0.4)


def test_layer_flops_match_formulas():
    """Forward: 2 FLOPs per weight and token plus causal attention; backward: twice that, 2.5 times for attention."""
    short = shorten(LLAMA)
    [costs] = measure_units(short, [MegatronConfig(dp_size=2)], StepSizes(1, LENGTH))
    layer = costs.layers[0]
    weights = sum(p.numel() for p in short.model.model.layers[0].parameters() if p.dim() == 2)
    assert sum(layer.forward.matmuls.values()) == 2 * weights * LENGTH
    assert sum(layer.backward.matmuls.values()) == 2 * 2 * weights * LENGTH
    assert layer.forward.attention == 2 * LENGTH**2 * LLAMA.hidden_size
    assert layer.backward.attention == 2.5 * layer.forward.attention
    head = costs.after.forward + costs.after.backward
    assert sum(head.matmuls.values()) == pytest.approx(3 * 2 * LLAMA.vocab_size * LLAMA.hidden_size * LENGTH, rel=0.01)
    assert "dp_shard" not in layer.forward.traffic


@pytest.mark.parametrize(
    ("model_type", "changes", "length"),
    [
        ("llama", {}, 2),
        ("gemma3_text", {"num_hidden_layers": 14}, 6),
        ("deepseek_v3", {"num_hidden_layers": 9}, 4),
        ("jamba", {}, 5),
    ],
)
def test_truncated_model_has_every_layer_kind(model_type, changes, length):
    config = CONFIG_MAPPING[model_type](**changes)
    short = shorten(config)
    assert len(short.names) == length and len(short.layers) == config.num_hidden_layers
    assert {*short.layers} <= {*range(length)}


def test_search_results_fit_and_are_written(tmp_path):
    job = Job(8, TINY, LENGTH, 64)
    plan = search_layouts(LLAMA, job)
    assert 1 <= len(plan.best) <= 3 and plan.considered > plan.fits >= len(plan.best)
    assert all(one.peak <= job.memory for one in plan.best)
    times = [one.seconds for one in plan.best]
    assert times == sorted(times)
    layouts = {(one.layout.tp_size, one.layout.cp_size, one.layout.pp_size) for one in plan.best}
    assert len(layouts) == len(plan.best)
    for one in plan.best:
        assert one.layout.ranks_per_replica * one.layout.dp_size == 8
        assert one.rows * one.microbatches * one.layout.dp_size == 64
        assert one.seconds >= one.compute and min(one.exposed.values(), default=0) >= 0 and one.bubble >= 0
    text = plan_as_text(plan, "llama", tokens=1e9)
    assert plan.best[0].layout.layout() in text and "days" in text
    values = json.loads(json.dumps(plan_as_dict(plan, 1e9)))
    assert values["best"][0]["layout"] == plan.best[0].layout.layout()
    for one in plan.best:
        path = tmp_path / "layout.yaml"
        path.write_text(layout_as_yaml(one), encoding="utf-8")
        assert MegatronConfig.from_yaml(path) == replace(one.layout, dp_size=None)
        launch = yaml.safe_load(launch_as_yaml(plan, one))
        assert launch["num_processes"] == 8 and launch["distributed_type"] == "MEGATRON_LM"
        assert {key.removeprefix("megatron_lm_") for key in launch["megatron_lm_config"]} <= {*LAUNCH_KEYS}
    draw_plan(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_fixed_sizes_and_infeasible_searches():
    plan = search_layouts(LLAMA, Job(8, TINY, LENGTH, 64), Bounds(fixed={"tp_size": 4, "cp_size": 1}))
    assert {one.layout.tp_size for one in plan.best} == {4}
    none = search_layouts(LLAMA, Job(2, replace(TINY, memory_gib=0.05), LENGTH, 64))
    assert not none.best and none.nearest is not None
    assert "nothing fits" in plan_as_text(none, "llama") and "does not fit" in plan_as_text(none, "llama")
    with pytest.raises(ConfigError, match="is not written: no layout fits"):
        write_plan(none, "nowhere.yaml")
    with pytest.raises(
        ConfigError, match="No layout of 6 devices is possible: dp 6: does not divide the global batch size 7"
    ):
        search_layouts(LLAMA, Job(6, TINY, LENGTH, 7), Bounds(fixed={"tp_size": 1, "pp_size": 1, "cp_size": 1}))


def test_more_work_takes_longer():
    cost_cache = UnitCostCache(shorten(LLAMA), Job(8, device("h100"), LENGTH, 64))
    cost_cache.measure({1, 2}, {1, 2}, {None})
    estimator = Estimator(cost_cache)
    one = estimator.estimate(MegatronConfig(dp_size=8), 1, 8)
    assert estimator.estimate(MegatronConfig(dp_size=8), 1, 16).seconds > 1.5 * one.seconds
    assert estimator.estimate(MegatronConfig(dp_size=8, recompute="full"), 1, 8).compute > 1.2 * one.compute
    split = estimator.estimate(MegatronConfig(dp_size=4, tp_size=2, sequence_parallel=True), 1, 16)
    assert split.exposed["tp"] > 0 and split.traffic["tp"] > 0
    shared = estimator.estimate(MegatronConfig(dp_size=4, cp_size=2), 1, 16)
    assert shared.traffic["cp"] > 0
    costs = cost_cache.costs(MegatronConfig(dp_size=8))
    forward, backward = costs.layers[0].forward, costs.layers[0].backward
    arguments = device("h100"), cost_cache.job.efficiency, "bf16", {}
    times = [seconds(replace(work, traffic={}), *arguments) for work in (forward, backward)]
    assert times[1].compute > 1.5 * times[0].compute


def test_command_searches_and_prints_shardings(tmp_path):
    LLAMA.save_pretrained(tmp_path / "model")
    runner = CliRunner()
    shardings = runner.invoke(app, ["show", str(tmp_path / "model"), "--layout", "tp4"])
    assert shardings.exit_code == 0 and "split dim 0 over tp" in shardings.output
    wrong = runner.invoke(app, ["plan", str(tmp_path / "model"), "--json"])
    assert wrong.exit_code == 2 and "Missing option '--num-gpus'" in wrong.output
    unknown = runner.invoke(app, ["plan", str(tmp_path / "model"), "--num-gpus", "8", "--gpu", "h1000"])
    assert unknown.exit_code == 2 and "expected one of" in unknown.output
    arguments = ["--num-gpus", "4", "--seq-length", "256", "--global-batch-size", "16", "--json", "--layout", "tp1+cp1"]
    result = runner.invoke(app, ["plan", str(tmp_path / "model"), *arguments, "--yaml", str(tmp_path / "layout.yaml")])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output[result.output.index("{") :])
    assert answer["best"][0]["tokens_per_second_and_device"] > 0
    lora = runner.invoke(
        app,
        [
            "plan",
            str(tmp_path / "model"),
            *arguments[:-3],
            "--lora",
            "8",
            "--quantized",
            "nf4",
            "--document-length",
            "64",
        ]
        + ["--offload-optimizer", "--recompute", "none", "--layout", "tp1+cp1"],
    )
    assert lora.exit_code == 0, lora.output
    assert "LoRA of rank 8 with a frozen base in nf4, packed with documents of 64 tokens" in lora.output
    assert MegatronConfig.from_yaml(tmp_path / "layout.yaml").tp_size == 1


def test_impossible_fixed_sizes_raise():
    for sizes, message in (
        ({"tp_size": 0}, "tp_size = 0: expected 1 or more"),
        ({"tp_size": 3}, "tp_size = 3: does not divide 8 devices"),
        ({"ep_size": 2}, "ep_size = 2: model type 'llama' has no experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            search_layouts(LLAMA, Job(8, device("h100"), LENGTH, 16), Bounds(fixed=sizes, recomputes=(None,)))


def test_non_power_of_two_sizes_are_searched():
    odd = LlamaConfig(**LLAMA.to_dict() | {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3})
    plan = search_layouts(odd, Job(6, device("h100"), LENGTH, 12), Bounds(fixed={"tp_size": 3}, recomputes=(None,)))
    assert {one.layout.tp_size for one in plan.best} == {3}


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("sizes", [{"ep_size": 2}, {"ep_size": 4}, {"tp_size": 2, "ep_size": 4}], ids=str)
def test_dispatched_tokens_are_counted_in_memory(sizes, recompute):
    layout = MegatronConfig(dp_size=DP, sequence_parallel="tp_size" in sizes, recompute=recompute, **sizes)
    ranks = DP * layout.ranks_per_replica
    cost_cache = UnitCostCache(shorten(EXPERTS), Job(ranks, device("h100"), LENGTH, DP))
    cost_cache.measure({layout.tp_size}, {1}, {recompute}, dispatches=True)
    [estimate] = Estimator(cost_cache).memory.categories(layout, 1, 1)
    [predicted] = predict_ranks(EXPERTS, layout, ranks, sequence_length=LENGTH)
    assert sum(estimate.values()) == pytest.approx(predicted.peak.size, rel=0.05 if recompute is None else 0.09)


@pytest.mark.parametrize("config", [MASKED, ENCODER_DECODER, IMAGES], ids=lambda config: config.model_type)
def test_other_architectures_are_searched(config):
    plan = search_layouts(config, Job(4, device("h100"), LENGTH, 16), Bounds(recomputes=(None,)))
    assert plan.best and plan.uncompared[0] == ()
    assert any("from the encoder to the decoder" in reason for reason in plan.reasons) == config.is_encoder_decoder
    if config.is_encoder_decoder:
        with pytest.raises(RankError, match="communication from encoder to decoder"):
            predict_ranks(config, MegatronConfig(pp_size=2), 2, sequence_length=LENGTH)


def test_unsupported_layouts_are_left_out_and_unverified_named():
    layouts = {"tp_size": 2, "pp_size": 1}
    without_sp = XLMConfig(vocab_size=1000, emb_dim=256, n_layers=4, n_heads=8, max_position_embeddings=LENGTH)
    plan = search_layouts(without_sp, Job(4, device("h100"), LENGTH, 16), Bounds(fixed=layouts, recomputes=(None,)))
    assert not plan.best[0].layout.sequence_parallel
    assert any(reason.startswith("sequence parallelism: ") for reason in plan.reasons)
    several = {"tp_size": 1, "cp_size": 1}
    uncut = XLMConfig(**without_sp.to_dict() | {"pre_norm": True})
    search = search_layouts(uncut, Job(4, device("h100"), LENGTH, 16), Bounds(fixed=several, recomputes=(None,)))
    assert {one.layout.pp_size for one in search.best} == {1} and any(r.startswith("pp: ") for r in search.reasons)
    scaled = GPT2Config(**TIED.to_dict() | {"scale_attn_by_inverse_layer_idx": True})
    changed = search_layouts(scaled, Job(4, device("h100"), LENGTH, 16), Bounds(fixed=layouts, recomputes=(None,)))
    assert "scale_attn_by_inverse_layer_idx" in changed.uncompared[0][0]
    assert "1 was not compared with one process" in plan_as_text(changed, "gpt2")


@pytest.mark.parametrize(
    ("config", "job", "message"),
    [
        (MASKED, {"sequence_length": 1024}, r"BertForMaskedLM has 512 positions"),
        (LLAMA, {"target_length": 8}, "'llama' has a label for each token"),
        (WhisperConfig(architectures=["WhisperForConditionalGeneration"]), {}, "no class that takes tokens"),
        (CLIPConfig(), {}, "no class that takes tokens"),
    ],
    ids=["positions", "labels", "audio", "no loss"],
)
def test_unplannable_models_raise(config, job, message):
    with pytest.raises(ConfigError, match=message):
        search_layouts(
            config, Job(**{"devices": 4, "device": device("h100"), "sequence_length": 512, "global_batch": 8} | job)
        )

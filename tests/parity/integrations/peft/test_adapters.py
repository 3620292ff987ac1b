"""Parity tests of PEFT adapters: loss, adapter gradients, weights after two steps, bit-identical frozen weights."""

import functools
import random
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from hf_megatron import local_named_parameters
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.core.placement import GradientRule, Placement
from hf_megatron.integrations.peft import dora, experts, factors, layout, lora, prompts, saving
from hf_megatron.models.modalities import sample_index
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.models.verified import read_results
from hf_megatron.parallel_state import parallel_state
from hf_megatron.pipeline_parallel.off_stage_module import Placeholder
from hf_megatron.testing.adapters import METHODS, adapted
from hf_megatron.testing.check import check_models
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

METHOD_LAYOUTS = {
    "lora": "tp2,tp2+sp,tp4,cp2,cp2+a2a,pp2,dp2+zero0,dp2,dp2+zero2,dp2+zero3,tp2+dp2+zero3,tp2+pp2+dp2,"
    "tp2+sp+pp2,tp2+cp2",
    "dora": "tp2,tp2+sp,tp4,cp2,pp2,dp2+zero2,tp2+dp2+zero3",
    "ia3": "tp2,tp2+sp,tp4,cp2,pp2,dp2+zero2,dp2+zero3",
    "ln_tuning": "tp2,tp2+sp,pp2,dp2+zero2,cp2",
    "saved": "tp2+sp,pp2,dp2+zero2",
    "embedding": "tp2,tp2+sp,tp4,pp2,cp2,dp2+zero2,dp2+zero3",
    "tokens": "tp2,tp2+sp,tp4,pp2,cp2,dp2+zero2,dp2+zero3,tp2+pp2",
    "vocabulary": "tp2,tp2+sp,pp2,tp2+pp2,dp2+zero2",
    "pissa": "tp2+sp,tp2+pp2,dp2,tp2+dp2+zero3",
    "olora": "tp2+sp,tp2+pp2,dp2",
    "lora_bias": "tp2+sp,pp2",
    "patterns": "tp2+sp,pp2",
    "rslora": "tp2+sp",
    "prompt": "tp2,tp2+sp,pp2,cp2,dp2+zero2,tp2+sp+pp2",
    "p_tuning": "tp2,tp2+sp,pp2,cp2,dp2",
    "prefix": "tp2,tp2+sp,tp4,dp2+zero2,dp2+zero3",
    "prefix_projection": "tp2+sp,dp2",
}
IMAGE_TYPES = ("gemma3", "qwen2_vl")
ENCODER_DECODER_TYPES = ("t5", "bart")
CASES = [(method, text) for method, texts in METHOD_LAYOUTS.items() for text in texts.split(",")]


@functools.cache
def get_tiny_model(model_type, method):
    sizes = {"microbatches": 2, "min_layers": 2, "batch_size": 4}
    task = "image" if model_type in IMAGE_TYPES else "seq2seq" if model_type in ENCODER_DECODER_TYPES else "causal"
    return adapted(make_tiny_model(CONFIG_MAPPING[model_type](), task=task, **sizes), method)


def compare(model_type, method, text, sabotage=None):
    return check_tiny_model(get_tiny_model(model_type, method), parse_layouts(text)[0], sabotage=sabotage)


@pytest.mark.parametrize(("method", "text"), CASES)
def test_methods_match_single_process(method, text):
    comparison = compare("llama", method, text)
    assert comparison.passed, comparison.report()


def test_every_method_is_covered():
    assert METHODS.keys() == METHOD_LAYOUTS.keys() | {"experts", "biases", "lora_text"}


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2"])
def test_biases(text):
    comparison = compare("qwen2", "biases", text)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    "text", ["tp2", "tp2+sp", "pp2", "dp2+ep2", "tp2+sp+ep2", "dp2+tp2+etp2+ep2", "pp2+dp2+ep2", "dp2+ep2+zero3"]
)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts(model_type, text):
    comparison = compare(model_type, "experts", text)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("model_type", "method", "text"),
    [("gpt2", "prompt", "pp2"), ("gpt2", "prefix", "tp2"), ("gemma2", "prefix", "tp2+sp")],
)
def test_prompt_methods_on_other_models(model_type, method, text):
    """Weights tied across pipeline ends; learned positions; sliding windows, which have separate key caches."""
    comparison = compare(model_type, method, text)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2"])
@pytest.mark.parametrize("model_type", ["gpt2", "gemma2"])
def test_trained_tokens_of_tied_tables(model_type, text):
    """Matrices stored as `[in, out]`; scaled embeddings, capped logits."""
    comparison = compare(model_type, "tokens", text)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
@pytest.mark.parametrize("model_type", ["gpt2", "phi3", "gpt_neox", "falcon", "minicpm3", "gemma2", "opt"])
def test_lora_on_linear_styles(model_type, text):
    comparison = compare(model_type, "lora", text)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("text", ["tp2+sp", "pp2"])
@pytest.mark.parametrize("model_type", IMAGE_TYPES)
def test_lora_on_text_backbone_with_frozen_vision(model_type, text):
    comparison = compare(model_type, "lora_text", text)
    assert comparison.passed, comparison.report()
    assert not [name for name in get_tiny_model(model_type, "lora_text").reference.gradients if "vis" in name]


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2"])
@pytest.mark.parametrize(("model_type", "method"), [("t5", "lora"), ("bart", "lora"), ("t5", "ia3")])
def test_adapters_on_encoder_and_decoder(model_type, method, text):
    comparison = compare(model_type, method, text)
    assert comparison.passed, comparison.report()


SEQ2SEQ_CONFIGS = {
    "lora": LoraConfig(init_lora_weights=False),
    "prompt": PromptTuningConfig(num_virtual_tokens=5),
    "prefix": PrefixTuningConfig(num_virtual_tokens=5),
}


@pytest.mark.parametrize(
    ("model_type", "method", "text"),
    [
        (name, of, text)
        for name in ENCODER_DECODER_TYPES
        for of in ("lora", "prompt")
        for text in ("tp2", "tp2+sp", "pp2")
    ]
    # PEFT derives T5's head size from its hidden size, so prefixes are tested on BART only.
    + [("bart", "prefix", "tp2"), ("bart", "prefix", "tp2+sp")],
)
def test_peft_seq2seq_models(model_type, method, text):
    """Gradients and generated tokens through PEFT's model class."""
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), task="seq2seq", min_layers=2)
    config = SEQ2SEQ_CONFIGS[method]
    config.task_type = "SEQ_2_SEQ_LM"

    def run(**kwargs):
        torch.manual_seed(3)
        model = get_peft_model(tiny_model.load(**kwargs), config).eval()
        model(**tiny_model.batches[0]).loss.backward()
        gradients = {
            name: parameter.grad for name, parameter in local_named_parameters(model) if parameter.requires_grad
        }
        unsharded = {
            name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for name, gradient in gradients.items()
        }
        ids = tiny_model.batches[0]["input_ids"]
        return unsharded, model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None)

    [(expected, tokens)] = run_ranks(run, 1)
    merged: dict = {}
    [layout] = parse_layouts(text)
    for gradients, generated in run_ranks(run, 2, megatron_config=ConfigUnderTest(**layout.to_dict())):
        merged |= gradients
        assert torch.equal(generated, tokens)
    assert merged.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(merged[name], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max()), name


def test_tensor_sizes_are_kept_off_stage():
    """Inkling's vision encoder has such sizes, and PEFT reads them on every stage."""
    linear = torch.nn.Linear(4, 2, device="meta")
    linear.in_features = torch.tensor(4)
    placeholder = Placeholder(linear, "lies on another stage", SimpleNamespace(is_filled=False, owner=None))
    assert (placeholder.in_features, placeholder.out_features) == (4, 2)


def swap_image_inputs():
    original = sample_index.rows_with_images

    def swap_samples(arguments, rows, config):
        image_inputs = original(arguments, rows, config)
        return image_inputs | ({"pixel_values": image_inputs["pixel_values"].flip(0)} if image_inputs else {})

    sample_index.rows_with_images = swap_samples


RECORDED = Path(__file__).parents[3] / "data" / "adapters.json"


# Layout and method -> number of verified model types, for text and for images.
LAYOUTS = {
    "tp1+cp2 lora": 12,
    "tp1+dp2+zero0 lora": 161,
    "tp1+dp2+zero2 lora": 161,
    "tp1+dp2+zero3 lora": 161,
    "tp1+ep2+dp2+zero1 lora": 4,
    "tp1+pp2 lora": 179,
    "tp2 lora": 184,
    "tp2+pp2+dp2+zero1 lora": 12,
    "tp2+sp lora": 179,
    "tp2+sp+ep2 lora": 4,
    "tp4 lora": 12,
}
IMAGE_LAYOUTS = {
    "tp1+pp2 lora": 75,
    "tp1+pp2 lora_text": 4,
    "tp2 lora": 77,
    "tp2 lora_text": 4,
    "tp2+sp lora": 76,
    "tp2+sp lora_text": 4,
}


def sample_recorded_types():
    """Draws twelve recorded text types and three recorded image types, with one layout each."""
    rows = [row for row in read_results(RECORDED.read_text("utf-8")) if row["passed"]]
    draw = random.Random(metadata.version("hf_megatron"))
    for count, of_images in ((12, False), (3, True)):
        candidates = [row for row in rows if ("modalities" in row) == of_images]
        for model_type in draw.sample(sorted({row["model_type"] for row in candidates}), count):
            row = draw.choice([row for row in candidates if row["model_type"] == model_type])
            layout, method = row["layout"].split(" ")
            # Some types have several classes, so the class is passed too.
            yield pytest.param(model_type, row["class"], layout, method, id=f"{model_type} {layout}")


@pytest.mark.parametrize(("model_type", "class_name", "layout", "method"), sample_recorded_types())
def test_recorded_types(model_type, class_name, layout, method):
    layouts = parse_layouts(layout)
    [row] = check_models([model_type], layouts, class_name=class_name, adapter=method, echo=lambda line: None)
    assert row["passed"], row["worst"]


def test_failed_records_state_a_reason():
    for row in read_results(RECORDED.read_text("utf-8")):
        unbuilt = "its tiny twin cannot be built", "its tiny model cannot be built"
        unsupported = row["worst"].startswith(("UnsupportedError", "ConfigError", *unbuilt))
        # AdamW turns round-off into full steps in one of twelve layers of BART's decoder.
        near = re.search(r"after adamw: 1\.[0-4]\d* x the limit", row["worst"])
        assert row["passed"] or unsupported or near or re.search("has no gradient,? in .* either", row["worst"]), row


def test_recorded_type_counts_per_layout():
    passed = [row for row in read_results(RECORDED.read_text("utf-8")) if row["passed"]]
    for expected, of_images in ((LAYOUTS, False), (IMAGE_LAYOUTS, True)):
        rows = [row for row in passed if ("modalities" in row) == of_images]
        types = {layout: len({row["model_type"] for row in rows if row["layout"] == layout}) for layout in expected}
        assert types == expected


# Seeded faults


def skip_factor_gradient_sum():
    factors._SUMMED = GradientRule()
    original = factors.plan_factors

    def plan_factors(*args):
        plan = original(*args)
        for factor in (plan.a, plan.b):
            object.__setattr__(factor, "switches", tuple((n, v and n != "sum_gradient") for n, v in factor.switches))
        return plan

    for module in (factors, __import__("hf_megatron.integrations.peft.site", fromlist=["site"])):
        module.plan_factors = plan_factors


def skip_lora_b_gradient_sum():
    original = factors.plan_factors

    def plan_factors(*args):
        plan = original(*args)
        object.__setattr__(plan.b, "switches", tuple((n, v and n != "sum_gradient") for n, v in plan.b.switches))
        return plan

    __import__("hf_megatron.integrations.peft.site", fromlist=["site"]).plan_factors = plan_factors


def ignore_fused_groups():
    original = Placement.split.__func__

    class Ungrouped(Placement):
        @classmethod
        def split(cls, axis, dim, *, groups=1, copies=1):
            return original(Placement, axis, dim, copies=copies)

    factors.Placement = Ungrouped


def skip_hook_move():
    layout._move_hooks = lambda hooks, source, target: None


def use_local_dora_norm():
    original = dora.shard_dora

    def shard_dora(tuner, adapter, factors, site):
        original(tuner, adapter, factors, site)
        tuner.lora_magnitude_vector[adapter].norm_group = None

    lora.shard_dora = shard_dora


def assume_contiguous_expert_columns():
    original = experts._dims
    experts._dims = lambda wrapper, dims, rank: original(wrapper, dims, 1)


def skip_expert_gradient_sum():
    original = experts.read_locally
    experts.read_locally = lambda module, mesh, forwards, summed: original(module, mesh, forwards, frozenset())


def skip_prefix_gradient_sum():
    prompts.copy_to_ranks = lambda unsharded, group: unsharded


def use_first_rank_prefix_heads():
    original = prompts._own_heads
    prompts._own_heads = lambda unsharded, ranks, rank, state: original(unsharded, ranks, 0, state)


FAULTS = {
    "a prefix's gradient of all heads": ("llama", "prefix", "tp2", skip_prefix_gradient_sum),
    "a prefix's heads": ("llama", "prefix", "tp2", use_first_rank_prefix_heads),
    "gradients of whole factors are parts": ("llama", "lora", "tp2", skip_factor_gradient_sum),
    "those of rows of a split sequence too": ("llama", "lora", "tp2+sp", skip_lora_b_gradient_sum),
    "images of another row": ("qwen2_vl", "lora_text", "pp2", swap_image_inputs),
    "groups of fused linears": ("gpt2", "lora", "tp2", ignore_fused_groups),
    "the rotary part of a latent": ("minicpm3", "lora", "tp2", skip_hook_move),
    "norms of own columns": ("llama", "dora", "tp2", use_local_dora_norm),
    "experts' columns take turns": ("qwen3_moe", "experts", "dp2+ep2", assume_contiguous_expert_columns),
    "parts of experts' gradients": ("qwen3_moe", "experts", "tp2", skip_expert_gradient_sum),
}


@pytest.mark.parametrize(("model_type", "method", "text", "sabotage"), FAULTS.values(), ids=list(FAULTS))
def test_seeded_faults_are_detected(model_type, method, text, sabotage):
    comparison = compare(model_type, method, text, sabotage)
    assert not comparison.passed and comparison.worst.value > 10


def test_ungathered_adapter_file_is_detected():
    tiny_model = get_tiny_model("llama", "lora")

    def save_local_shards():
        saving.gather_full_tensor = lambda tensor: tensor.to_local().clone()

    def on_rank():
        save_local_shards()
        model = tiny_model.load(megatron_config=ConfigUnderTest(tp_size=2))
        adapter_state = saving.full_adapter(
            {n: p for n, p in model.named_parameters() if "lora" in n}, parallel_state(model)
        )
        return {name: tuple(tensor.shape) for name, tensor in adapter_state.items()}

    full_shapes = {name: tuple(parameter.shape) for name, parameter in tiny_model.load().named_parameters()}
    assert any(shape != full_shapes[name] for name, shape in run_ranks(on_rank, 2)[0].items())


# Dropout


def record_dropout_masks(layout_text, sabotage=None):
    """Returns, per rank, the dropped input entries of a column-parallel and of a row-parallel linear's adapters."""

    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"]())

    def on_rank():
        if sabotage is not None:
            sabotage()
        [config] = parse_layouts(layout_text)
        model = tiny_model.load(megatron_config=ConfigUnderTest(**config.to_dict())).train()
        torch.manual_seed(torch.distributed.get_rank())
        wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], lora_dropout=0.5))
        masks = []
        layer = wrapped.get_base_model().model.layers[0].self_attn
        for linear in (layer.q_proj, layer.o_proj):
            own = type(linear.lora_dropout.default).forward

            def forward(self, x, own=own):
                masks.append((own(self, torch.ones_like(x)) == 0).clone())
                return x

            linear.lora_dropout.default.forward = functools.partial(forward, linear.lora_dropout.default)
        torch.manual_seed(torch.distributed.get_rank())
        wrapped(input_ids=torch.arange(3, 27).view(2, 12))
        return masks

    return run_ranks(on_rank, 2)


def use_local_dropout_rng():
    lora.draw_in_turn = lambda *args, **kwargs: None


@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
def test_dropout_masks_match_where_inputs_are_replicated(text):
    first, second = record_dropout_masks(text)
    assert 0.3 < first[0].float().mean() < 0.7
    assert torch.equal(first[0], second[0]), "a column linear's input is the same on all ranks"
    assert not torch.equal(first[1], second[1]), "of a row linear's each has its part"


def test_unsynced_dropout_is_detected():
    first, second = record_dropout_masks("tp2+sp", use_local_dropout_rng)
    assert not torch.equal(first[0], second[0])


def test_unknown_adapter_method_raises():
    with pytest.raises(Exception, match="adapter 'lorra': expected one of lora, lora_text, rslora"):
        adapted(make_tiny_model(CONFIG_MAPPING["llama"]()), "lorra")

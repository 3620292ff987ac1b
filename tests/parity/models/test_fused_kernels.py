"""Parity tests of Liger's kernels in sharded models: its patches run, and its Triton launches are replaced by torch."""

import functools

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron import UnsupportedError
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.losses.liger_head import LigerHead
from hf_megatron.tensor_parallel.user_hooks import replaced_functions
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.liger_on_cpu import liger_on_cpu
from tests.helpers.shared_tiny_models import make_tiny_model

LAYOUTS = "dp2,dp2+zero3,tp2,tp2+sp,pp2,cp2,tp2+sp+pp2"
CASES = [
    # model type, when Liger is applied, layouts, its settings, attributes of the tiny config
    ("llama", "before", LAYOUTS, {}, {"tie_word_embeddings": True}),
    ("llama", "after", LAYOUTS, {"fused_linear_cross_entropy": False}, {"vocab_size": 129}),
    ("llama", "after", "dp2,tp2+sp,cp2", {}, {}),
    ("gemma2", "before", "tp2+sp,cp2", {}, {}),
    ("gemma2", "after", "tp2,pp2", {"fused_linear_cross_entropy": False}, {}),
    ("gemma3_text", "after", "tp2+sp,cp2", {"fused_linear_cross_entropy": False}, {}),
    ("olmo2", "before", "tp2+sp", {}, {}),
    ("olmo2", "after", "tp2", {"fused_linear_cross_entropy": False}, {}),
    ("phi3", "before", "tp2+sp", {}, {}),
    ("phi3", "after", "tp2", {"fused_linear_cross_entropy": False}, {}),
    ("qwen2", "before", "tp2+sp", {}, {}),
    ("qwen3", "after", "tp2+sp,cp2", {"fused_linear_cross_entropy": False}, {}),
]


@pytest.fixture(autouse=True)
def liger():
    pytest.importorskip("liger_kernel")


@functools.lru_cache(maxsize=4)
def get_tiny_model(model_type, changes=()):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="causal", changes=dict(changes), microbatches=2)


def patch_function(model_type):
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]


def check(model_type, when, layout, settings, changes=(), **options):
    """Compares a model with Liger's kernels on the ranks of a layout with a stock model in a single process."""
    tiny_model, apply = get_tiny_model(model_type, changes), patch_function(model_type)
    with liger_on_cpu():
        if when == "before":
            apply(**settings)
        else:
            options["prepare"] = lambda model: apply(model=model, **settings)
        return check_tiny_model(tiny_model, parse_layouts(layout)[0], **options)


def flatten_cases():
    for model_type, when, layouts, settings, changes in CASES:
        for layout in layouts.split(","):
            name = "-".join([model_type, when, layout, *(f"{key}={value}" for key, value in changes.items())])
            yield pytest.param(
                model_type, when, layout, settings, tuple(changes.items()), id=name if settings else f"{name}-own_head"
            )


@pytest.mark.parametrize(("model_type", "when", "layout", "settings", "changes"), flatten_cases())
def test_kernels_match_single_process(model_type, when, layout, settings, changes):
    comparison = check(model_type, when, layout, settings, changes)
    assert comparison.passed, comparison.report()


def test_wrong_kernel_is_detected():
    def sabotage():
        from liger_kernel.ops import swiglu

        correct = swiglu.swiglu_backward
        swiglu.swiglu_backward = lambda a, b, gradient, *rest: correct(a, b, gradient * 1.001, *rest)

    assert not check("llama", "before", "tp2+sp", {}, sabotage=sabotage).passed


def set_norm_on_shards(model):
    """Sets Liger's forward on norms over features that are split over ranks."""
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module

    for layer in model.model.layers:
        _patch_rms_norm_module(layer.self_attn.attn_sub_norm)


def test_kernel_that_bypasses_a_sum_over_ranks(monkeypatch):
    """BitNet's norm of attention outputs sums over the ranks: a kernel is rejected, and would give other gradients."""
    with liger_on_cpu():
        tiny_model, [layout] = get_tiny_model("bitnet"), parse_layouts("tp2")
        with pytest.raises(Exception, match=r"(?s)attn_sub_norm.forward is Liger's LigerRMSNorm.*Pass rms_norm=False"):
            check_tiny_model(tiny_model, layout, prepare=set_norm_on_shards)
        assert check_tiny_model(tiny_model, layout).passed
        monkeypatch.setattr(replaced_functions, "has_parallel_forward", lambda module: False)
        assert not check_tiny_model(tiny_model, layout, prepare=set_norm_on_shards).passed


def test_full_weight_of_the_head_is_never_read(monkeypatch):
    """Without the change of the arguments, Liger's forward takes the head's weight: it cannot multiply shards."""
    monkeypatch.setattr(LigerHead, "_enter", lambda *_: None)
    with pytest.raises(Exception, match="DTensor|active drivers"):
        check("llama", "before", "tp2", {})


@pytest.mark.parametrize(
    ("model_type", "when", "layout", "settings", "message"),
    [
        ("llama", "before", "tp2", {"cross_entropy": True}, "liger_cross_entropy.*Pass cross_entropy=False"),
        ("llama", "after", "cp2", {"cross_entropy": True}, "liger_cross_entropy.*Pass cross_entropy=False"),
        ("llama", "after", "pp2", {"fused_linear_cross_entropy": True}, "with fused_linear_cross_entropy=False"),
        ("mixtral", "before", "tp2", {}, "LigerExperts.*Pass swiglu=False"),
        ("mixtral", "after", "tp2", {}, "LigerExperts.*Pass swiglu=False"),
        ("mixtral", "after", "dp2+ep2", {}, "LigerExperts.*ep_size > 1.*Pass swiglu=False"),
    ],
)
def test_other_kernels_are_rejected_by_name(model_type, when, layout, settings, message):
    settings = {"fused_linear_cross_entropy": False} | settings
    with pytest.raises(Exception, match=f"(?s){UnsupportedError.__name__}.*{message}"):
        check(model_type, when, layout, settings)

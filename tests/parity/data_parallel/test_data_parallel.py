"""Parity tests of data parallelism: loss, gradients and weights for the same global batch.

Batches have five samples, one without labels, so that dp ranks have unequal numbers of samples and of labels.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from hf_megatron.core.communication import mean_grad_ops
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.data_parallel import bucket_assignment
from hf_megatron.parallelize import parallel_state
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

ALL_STAGES = "dp2+zero0,dp2+zero1,dp2+zero2,dp2+zero3"
TP_AND_DP = "tp2+dp2+zero0,tp2+dp2+zero1,tp2+sp+dp2+zero2,tp2+sp+dp2+zero3"
HYBRID = "dp4+replicas2+zero1,dp4+replicas2+zero2,dp4+replicas2+zero3"
CASES = [
    # model type, microbatches per step, layouts
    ("llama", 1, ALL_STAGES),
    ("llama", 3, ALL_STAGES),
    ("llama", 3, TP_AND_DP),
    ("llama", 3, HYBRID),
    ("llama", 1, "dp4+zero1,dp4+zero3,tp2+dp4+zero1,tp4+dp2+zero3"),
    ("gemma2", 1, "dp2+zero1,tp2+sp+dp2+zero3"),
    ("gpt2", 3, "dp2+zero1,dp4+zero3,tp2+dp2+zero1"),
    ("opt", 3, "dp2+zero2,tp2+sp+dp2+zero1"),
    ("qwen3_moe", 3, "dp4+zero2,dp2+zero3,tp2+dp2+zero1"),
]


@functools.lru_cache(maxsize=2)
def _get_tiny_model(model_type: str, microbatches: int):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=microbatches, batch_size=5)


def _flatten_cases():
    for model_type, microbatches, layouts in CASES:
        for text, layout in zip(layouts.split(","), parse_layouts(layouts), strict=True):
            yield pytest.param(model_type, microbatches, layout, id=f"{model_type}-{text}-{microbatches}")


@pytest.mark.parametrize(("model_type", "microbatches", "layout"), _flatten_cases())
def test_layouts_match_single_process(model_type, microbatches, layout):
    comparison = check_tiny_model(_get_tiny_model(model_type, microbatches), layout)
    assert comparison.passed, comparison.report()


def use_small_buckets():
    bucket_assignment.default_capacity = lambda *args, **kwargs: 2**15


def require_several_buckets(model):
    assert len(parallel_state(model).data_parallel.reducer.buckets) > 3


@pytest.mark.parametrize(
    "layout",
    parse_layouts("dp2+zero0,dp2+zero1,dp2+zero2,dp4+replicas2,tp2+sp+dp2"),
    ids=lambda layout: f"{layout.layout()}-{layout.dp_replicate_size}",
)
def test_several_buckets_match_single_process(layout):
    comparison = check_tiny_model(
        _get_tiny_model("llama", 3), layout, sabotage=use_small_buckets, prepare=require_several_buckets
    )
    assert comparison.passed, comparison.report()


def use_native_collectives():
    """Selects the code path of backends with native collectives; gloo's collectives are called there."""
    dist.get_backend = lambda group=None: "nccl"
    use_small_buckets()


BY_COLLECTIVES = "dp2+zero0,dp2+zero1,dp2+zero2,dp4+zero1,dp4+zero2,dp4+replicas2,dp4+replicas2+zero2,tp2+dp2+zero1"


@pytest.mark.parametrize("layout", parse_layouts(BY_COLLECTIVES), ids=BY_COLLECTIVES.split(","))
def test_native_collectives_match_single_process(layout):
    comparison = check_tiny_model(
        _get_tiny_model("llama", 3), layout, sabotage=use_native_collectives, prepare=require_several_buckets
    )
    assert comparison.passed, comparison.report()


def test_pipeline_native_collectives_match_single_process():
    [layout] = parse_layouts("pp2+dp2+zero1")
    comparison = check_tiny_model(_get_tiny_model("llama", 3), layout, sabotage=use_native_collectives)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_unequal_samples_and_labels(ranks):
    """Precondition of the cases above."""
    parts = _get_tiny_model("llama", 3).batches[0]["labels"].tensor_split(ranks)
    assert len({len(part) for part in parts}) == 2
    assert len({int((part[:, 1:] != -100).sum()) for part in parts}) == 2


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a rank-dependent factor that averages to 1."""

    @staticmethod
    def forward(ctx, loss, factor):
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def scale_loss_gradient_by_rank(model):
    state = parallel_state(model)
    factor = 2 * (state.mesh.dp_rank + 1) / (state.mesh.dp_size + 1)

    def scale_gradient(model, args, output):
        if torch.is_grad_enabled():
            output.loss = _ScaledGradient.apply(output.loss, factor)

    model.register_forward_hook(scale_gradient)


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3", "tp2+dp2", "pp2+dp2", "cp2+dp2"])
def test_rank_loss_factors_are_averaged(text):
    """Training loops multiply a loss by their rank's share of the tokens."""
    [layout] = parse_layouts(text)
    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"](), microbatches=2, batch_size=5)
    comparison = check_tiny_model(tiny_model, layout, prepare=scale_loss_gradient_by_rank)
    assert comparison.passed, comparison.worst


def test_unaveraged_loss_factors_are_detected():
    """Seeded fault: the local gradient times the group size replaces the all-reduced gradient."""

    def skip_gradient_average():
        mean_grad_ops._added_up = lambda gradient, group: gradient * torch.distributed.get_world_size(group)

    [layout] = parse_layouts("dp2")
    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"](), microbatches=2, batch_size=5)
    comparison = check_tiny_model(
        tiny_model, layout, sabotage=skip_gradient_average, prepare=scale_loss_gradient_by_rank
    )
    assert not comparison.passed and comparison.worst.value > 10

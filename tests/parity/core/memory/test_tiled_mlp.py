"""Parity tests of tiled MLPs and of layer inputs offloaded to CPU memory."""

import functools

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

from hf_megatron import ConfigError, MegatronConfig, RankError
from hf_megatron.core.memory import activation_offload, tiled_mlp
from hf_megatron.core.memory.activation_offload import OffloadedInputs
from hf_megatron.core.memory.tiled_mlp import TiledMLP, find_mlps
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "cp2": {"cp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "dp2+zero3": {"dp_size": 2, "zero_stage": 3},
    "dp2": {"dp_size": 2},
    "tp2+cp2": {"tp_size": 2, "cp_size": 2},
}


@functools.lru_cache(maxsize=2)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2)


def require_modules(kind, count):
    """Returns a `prepare` that requires at least `count` modules of type `kind` on each rank."""

    def prepare(model):
        modules = [module for module in model.modules() if isinstance(module, kind)]
        assert len(modules) >= count, modules

    return prepare


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_match_single_process(name, recompute):
    layout = ConfigUnderTest(**LAYOUTS[name], mlp_chunk_size=7, recompute=recompute)
    comparison = check_tiny_model(get_tiny_model("llama"), layout, prepare=require_modules(TiledMLP, 1))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "deepseek_v3", "phi3"])
def test_types_match_single_process(model_type):
    layout = ConfigUnderTest(tp_size=2, mlp_chunk_size=5)
    comparison = check_tiny_model(get_tiny_model(model_type), layout, prepare=require_modules(TiledMLP, 1))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("name", LAYOUTS)
def test_offloaded_inputs_match_single_process(name):
    layout = ConfigUnderTest(**LAYOUTS[name], recompute="full", offload_activations=True)
    comparison = check_tiny_model(get_tiny_model("llama"), layout, prepare=require_modules(OffloadedInputs, 1))
    assert comparison.passed, comparison.report()


def test_noncontiguous_tiles_match_single_process():
    """GPT-2's linears call `view` on their input, and tiles of several samples are not contiguous."""
    comparison = check_tiny_model(get_tiny_model("gpt2"), ConfigUnderTest(cp_size=2, mlp_chunk_size=5))
    assert comparison.passed, comparison.report()


def detach_tiles():
    tiled_mlp.checkpoint = lambda function, part, use_reentrant: function(part).detach()


def corrupt_offloaded_inputs():
    activation_offload._unpack = lambda kept: kept.unpack() * 1.001 if hasattr(kept, "unpack") else kept


@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        (detach_tiles, {"mlp_chunk_size": 7}),
        (corrupt_offloaded_inputs, {"recompute": "full", "offload_activations": True}),
    ],
)
def test_seeded_faults_are_detected(fault, fields):
    assert not check_tiny_model(get_tiny_model("llama"), ConfigUnderTest(tp_size=2, **fields), sabotage=fault).passed


def test_find_mlps():
    for model_type, expected in (
        ("llama", {"mlp"}),
        ("gpt2", {"mlp"}),
        ("phi3", {"mlp"}),
        # Routed experts select their tokens and are not tiled; the first layers and the shared experts are dense.
        ("deepseek_v3", {"mlp", "mlp.shared_experts"}),
        ("qwen3_moe", set()),
        ("opt", set()),
    ):
        model = get_tiny_model(model_type).model_on_meta()
        layers = next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        names = {name.removeprefix(f"{layers}.").partition(".")[2] for name in find_mlps(model, layers)}
        assert names == expected, model_type


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden):
        return self.down(self.up(hidden + hidden.roll(1, 1)))


def test_token_mixing_mlp_raises():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].mlp = Mixing()
    assert tiled_mlp.tile_mlps(model, "layers", 8) == ["layers.0.mlp"]
    model.train()
    with pytest.raises(Exception, match=r"layers.0.mlp \(Mixing\): it does not process tokens independently"):
        model.layers[0].mlp(torch.randn(2, 12, 4))
    model.eval()
    assert model.layers[0].mlp(torch.randn(2, 12, 4)).shape == (2, 12, 4)


def test_inplace_edit_raises():
    layer = OffloadedLayer()
    hidden = torch.randn(2, 3, requires_grad=True) * 1
    loss = layer(hidden).sum()
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class OffloadedLayer(OffloadedInputs):
    def forward(self, hidden):
        return hidden**2


def test_models_without_mlps_raise():
    message = "mlp_chunk_size = 8: the layers of OPTForCausalLM have no .* Leave it out, or use recompute='full'"
    with pytest.raises(RankError, match=message):
        check_tiny_model(get_tiny_model("opt"), ConfigUnderTest(tp_size=2, mlp_chunk_size=8))
    for fields in ({}, {"recompute": "full"}):
        comparison = check_tiny_model(get_tiny_model("opt"), ConfigUnderTest(tp_size=2, **fields))
        assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"mlp_chunk_size": 0}, "mlp_chunk_size = 0"),
        (
            {"mlp_chunk_size": 8, "tp_size": 2, "sequence_parallel": True},
            "mlp_chunk_size = 8 is not supported with sequence_parallel",
        ),
        ({"offload_activations": True}, "offload_activations = True: needs recompute='full'"),
        ({"offload_activations": 1, "recompute": "full"}, "offload_activations = 1: expected True or False"),
    ],
)
def test_invalid_fields_raise(fields, match):
    with pytest.raises(ConfigError, match=match):
        MegatronConfig(**fields)

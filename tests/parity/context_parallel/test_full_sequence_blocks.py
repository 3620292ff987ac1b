"""Parity tests of full-sequence blocks with a sharding style in a sequence-parallel stack."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models.registry import REGISTRY, register_model, registered_types
from hf_megatron.models.spec_helpers import family_spec
from hf_megatron.testing.parity import check_tiny_model, make_tiny_model


class _OneExpert(nn.Module):
    """MLP that owns its weights, as experts do, and is a direct child of a layer."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(config.intermediate_size, config.hidden_size) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(config.hidden_size, config.intermediate_size) * 0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.silu(hidden_states @ self.up_proj.T) @ self.down_proj.T


def _make_spec(model):
    plan = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp": "partial_sum",
        "layers.*.mlp.up_proj": "shard_dim_-2",
        "layers.*.mlp.down_proj": "shard_dim_-1",
    }
    return family_spec(model, plan)


@pytest.fixture
def blocks_of_experts(monkeypatch):
    registered_types()
    monkeypatch.setattr(modeling_llama, "LlamaMLP", _OneExpert)
    monkeypatch.setitem(REGISTRY, "llama", None)
    register_model("llama", _make_spec, replace=True)


@pytest.mark.parametrize("layout", parse_layouts("tp2,tp2+sp"), ids=lambda layout: layout.layout())
def test_partial_sum_block_directly_in_a_layer(layout, blocks_of_experts):
    comparison = check_tiny_model(make_tiny_model(LlamaConfig(), task="causal", changes={}, microbatches=2), layout)
    assert comparison.passed, comparison.report()

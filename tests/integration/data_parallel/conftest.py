"""Models that several files of this folder train."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory):
    """Folder of a random Qwen3-MoE of two layers with four experts, fused in tensors of three dims."""
    folder = tmp_path_factory.mktemp("tiny_experts")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder

"""Tests of experts that are wrapped after loading."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.testing.tiny_model import draw_parameters
from tests.helpers.training import make_batch, parse_layout, shard_batch


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) * self.scale


def train_scaled_experts(path, config=None):
    """Returns the loss and gradient norm of two steps."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    for layer in model.model.layers:
        layer.mlp.experts = Scaled(layer.mlp.experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config is not None:
        prepare_optimizer(optimizer)
    values = []
    for step in range(2):
        loss = model(**shard_batch(model, make_batch(step))).loss
        loss.backward()
        values += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))]
        optimizer.step()
        optimizer.zero_grad()
    return values


def test_wrapped_experts(tmp_path):
    """Without expert parallelism, the weights of wrapped experts are replicated, and train as added ones."""
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        num_local_experts=4,
        vocab_size=64,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    draw_parameters(model, 0)
    model.save_pretrained(tmp_path)

    def on_rank():
        for text in ("dp2+ep2", "cp2+ep2"):
            with pytest.raises(UnsupportedError, match=r"experts.inner.* was wrapped or renamed .*\. Set ep_size=1\.$"):
                train_scaled_experts(tmp_path, parse_layout(text))
        return train_scaled_experts(tmp_path, parse_layout("dp2"))

    [expected] = run_ranks(train_scaled_experts, 1, tmp_path)
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2

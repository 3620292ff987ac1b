"""Tests of user-placed `torch.utils.checkpoint` inside a layer: the recomputation draws the same random numbers."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from hf_megatron import RankError, shard_safe
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.core.communication import rng
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import parse_layout
from tests.helpers.training import make_batch

dropout = functools.partial(torch.nn.functional.dropout, p=0.5)


def block(layer, hidden):
    return layer.mlp(hidden.sin())


def several_blocks(layer, hidden):
    return dropout(layer.mlp(layer.post_attention_layernorm(dropout(hidden))))


def make_forward(layer, part, again):
    @shard_safe
    def forward(hidden_states, use_cache=None, **kwargs):
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        # Dropout before the checkpointed block, so that the block does not start at the beginning of an RNG stream.
        hidden = hidden_states + dropout(attended)
        return hidden + again(functools.partial(part, layer), hidden)

    return forward


def compare_gradients(path, text, part, reentrant):
    """Compares losses, RNG state and gradients with and without checkpointing, for two forwards in flight."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout(text)).train()
    for layer in model.model.layers:
        plain = type(layer.mlp).forward
        layer.mlp.forward = shard_safe(lambda x, mlp=layer.mlp, plain=plain: dropout(plain(mlp, dropout(x))))
    runs = []
    for again in (lambda function, x: function(x), functools.partial(checkpoint, use_reentrant=reentrant)):
        for layer in model.model.layers:
            layer.forward = make_forward(layer, part, again)
        model.zero_grad()
        torch.manual_seed(5)
        losses = [model(**make_batch(seed)).loss for seed in range(2)]
        for loss in losses:
            loss.backward()
        gradients = [local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None]
        runs.append([*(loss.detach() for loss in losses), torch.rand(1), *gradients])
    return all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", [block, several_blocks])
@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
def test_checkpointing_keeps_gradients(tiny, text, part, reentrant):
    assert run_ranks(compare_gradients, 2, tiny, text, part, reentrant) == [True, True]


def train_with_short_rng_history(path):
    rng._KNOWN = 4
    compare_gradients(path, "tp2+sp", block, False)


def test_expired_rng_state_is_rejected(tiny):
    with pytest.raises(RankError, match="random state that is no longer stored"):
        run_ranks(train_with_short_rng_history, 2, tiny)


def train_after_failed_forward(path):
    """Trains after a forward that raises inside a layer, before the rank-local RNG stream is reset."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2+sp")).train()
    torch.manual_seed(3)
    forward = model.model.layers[0].self_attn.o_proj.forward

    @shard_safe
    def fail(x):
        raise KeyError("nothing")

    model.model.layers[0].self_attn.o_proj.forward = fail
    with pytest.raises(KeyError):
        model(**make_batch(0))
    model.model.layers[0].self_attn.o_proj.forward = forward
    other = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2+sp")).train()
    other(**make_batch(0)).loss.backward()
    model(**make_batch(0)).loss.backward()
    return torch.rand(1)


def test_training_resumes_after_failed_forward(tiny):
    one, two = run_ranks(train_after_failed_forward, 2, tiny)
    assert one == two

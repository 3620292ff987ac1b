"""`torch.utils.checkpoint` that a user puts inside of a layer: what is computed again draws the same numbers."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from hf_megatron import RankError, shard_safe
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.core.communication import rng
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import layout
from tests.helpers.training import batch

dropped = functools.partial(torch.nn.functional.dropout, p=0.5)


def block(layer, hidden):
    return layer.mlp(hidden.sin())


def several_blocks(layer, hidden):
    return dropped(layer.mlp(layer.post_attention_layernorm(dropped(hidden))))


def forward_of(layer, part, again):
    @shard_safe
    def forward(hidden_states, use_cache=None, **kwargs):
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        # Draws before, too: a part does not begin at the beginning of a stream.
        hidden = hidden_states + dropped(attended)
        return hidden + again(functools.partial(part, layer), hidden)

    return forward


def train(path, text, part, reentrant):
    """Gradients of the same random numbers without and with a checkpoint, those of two forwards at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout(text)).train()
    for layer in model.model.layers:
        plain = type(layer.mlp).forward
        layer.mlp.forward = shard_safe(lambda x, mlp=layer.mlp, plain=plain: dropped(plain(mlp, dropped(x))))
    found = []
    for again in (lambda function, x: function(x), functools.partial(checkpoint, use_reentrant=reentrant)):
        for layer in model.model.layers:
            layer.forward = forward_of(layer, part, again)
        model.zero_grad()
        torch.manual_seed(5)
        losses = [model(**batch(seed)).loss for seed in range(2)]
        for loss in losses:
            loss.backward()
        gradients = [local_tensor(p.grad).clone() for p in model.parameters() if p.grad is not None]
        found.append([*(loss.detach() for loss in losses), torch.rand(1), *gradients])
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", [block, several_blocks])
@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
def test_the_same_gradients_with_and_without(tiny, text, part, reentrant):
    assert run_ranks(train, 2, tiny, text, part, reentrant) == [True, True]


def too_late(path):
    rng._KNOWN = 4
    train(path, "tp2+sp", block, False)


def test_a_stream_of_long_ago_is_refused(tiny):
    with pytest.raises(RankError, match="random state that is no longer stored"):
        run_ranks(too_late, 2, tiny)


def go_on(path):
    """A forward that fails inside a layer leaves the stream of a rank behind."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout("tp2+sp")).train()
    torch.manual_seed(3)
    forward = model.model.layers[0].self_attn.o_proj.forward

    @shard_safe
    def fail(x):
        raise KeyError("nothing")

    model.model.layers[0].self_attn.o_proj.forward = fail
    with pytest.raises(KeyError):
        model(**batch(0))
    model.model.layers[0].self_attn.o_proj.forward = forward
    other = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout("tp2+sp")).train()
    other(**batch(0)).loss.backward()
    model(**batch(0)).loss.backward()
    return torch.rand(1)


def test_training_goes_on_after_a_forward_that_failed(tiny):
    one, two = run_ranks(go_on, 2, tiny)
    assert one == two

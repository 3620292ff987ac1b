"""Tests of the RNG streams in models that draw nothing, and that begin to draw."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_megatron
from hf_megatron import MegatronConfig
from hf_megatron.core.communication.rng import TensorParallelRng
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import UnsupportedError
from hf_megatron.tensor_parallel import rng_observer
from tests.helpers.training import make_batch

LAYOUTS = {
    "tp2": MegatronConfig(tp_size=2),
    "tp2+sp": MegatronConfig(tp_size=2, sequence_parallel=True),
}


def load(path, layout):
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=LAYOUTS[layout]).train()


def set_dropout(model, rate):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = rate


def losses_with_dropout(path, layout, forwards_before):
    """Returns the losses of two forwards with dropout, after forwards without it."""
    model = load(path, layout)
    for _ in range(forwards_before):
        model(**make_batch(0)).loss.backward()
    model.zero_grad()
    set_dropout(model, 0.5)
    torch.manual_seed(0)
    losses = []
    for _ in range(2):
        loss = model(**make_batch(0)).loss
        loss.backward()
        losses.append(loss.item())
    return losses, float(sum(parameter.grad.full_tensor().norm() for parameter in model.parameters()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_that_is_turned_on_later_draws_as_from_the_start(tiny, layout):
    expected = run_ranks(losses_with_dropout, 2, tiny, layout, 0)
    assert expected[0][0][0] != expected[0][0][1]
    assert run_ranks(losses_with_dropout, 2, tiny, layout, 4) == expected


def count_switches(path, layout):
    model, switches = load(path, layout), []
    manual_seed = TensorParallelRng.use_local_rng

    def count(rng):
        switches[-1] += not (rng.is_idle or rng._is_own())
        manual_seed(rng)

    TensorParallelRng.use_local_rng = count
    for _ in range(4):
        switches.append(0)
        model(**make_batch(0)).loss.backward()
    set_dropout(model, 0.5)
    switches.append(0)
    model(**make_batch(0))
    model.eval()
    model.train()
    set_dropout(model, 0.0)
    for _ in range(3):
        switches.append(0)
        model(**make_batch(0))
    return switches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_are_not_switched_where_nothing_draws(tiny, layout):
    for switches in run_ranks(count_switches, 2, tiny, layout):
        first = switches[0]
        assert first > 0 and switches == [first, first, 0, 0, first, first, first, 0], switches


class Noisy(nn.Module):
    """Activation that draws in some forwards only."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.options = inner, {"noise": 0.0}

    def forward(self, hidden):
        noise = self.options["noise"]
        return self.inner(hidden) if noise == 0 else self.inner(hidden) + noise * torch.rand_like(hidden)


def draw_without_setting(path, layout, is_fault):
    """Returns what each rank draws in the first forward that draws, after forwards that did not."""
    if is_fault:
        rng_observer._is_known = lambda value: True
    model = load(path, layout)
    activations = [hf_megatron.shard_safe(Noisy(layer.mlp.act_fn)) for layer in model.model.layers]
    for layer, activation in zip(model.model.layers, activations, strict=True):
        layer.mlp.act_fn = activation
    drawn = []
    activations[0].register_forward_hook(
        hf_megatron.shard_safe(lambda module, args, output: drawn.append(output - module.inner(args[0])))
    )
    for _ in range(4):
        model(**make_batch(0)).loss.backward()
    for activation in activations:
        activation.options["noise"] = 0.1
    if is_fault:
        with pytest.raises(UnsupportedError, match="drew random numbers without a dropout setting"):
            model(**make_batch(0))
        # The ranks have drawn equal numbers for different features. The advice: call the model again.
        equal = drawn[-1].detach()
        model(**make_batch(0)).loss.backward()
        return equal, drawn[-1].detach()
    model(**make_batch(0)).loss.backward()
    return drawn[-1].detach()


def test_modules_of_users_always_draw_for_their_rank(tiny):
    first, second = run_ranks(draw_without_setting, 2, tiny, "tp2", False)
    assert first.abs().max() > 0.05 and (first - second).abs().max() > 0.05


def test_draws_without_a_setting_are_rejected_once(tiny):
    """The fault takes the module of a user for a known one, which draws without a setting that can be read."""
    (equal, first), (also_equal, second) = run_ranks(draw_without_setting, 2, tiny, "tp2", True)
    assert (equal - also_equal).abs().max() < 1e-6
    assert first.abs().max() > 0.05 and (first - second).abs().max() > 0.05

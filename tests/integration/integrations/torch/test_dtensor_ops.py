"""Tests of reads of weights sharded by tensor parallelism and ZeRO-3, as in training loops, against one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.torch import dtensor_methods


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut") / "model"
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32, resid_pdrop=0, attn_pdrop=0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def read_scalar(value):
    return value.full_tensor().item() if hasattr(value, "full_tensor") else value.item()


WAYS = {
    "whole": lambda p, alongside: (p.full_tensor() if hasattr(p, "full_tensor") else p) * alongside,
    "flat beside a plain one": lambda p, alongside: p.flatten() * alongside.flatten(),
    "flat twice": lambda p, alongside: p.flatten() * p.reshape(p.shape[0], -1).t().flatten(),
    "rows": lambda p, alongside: p[: p.shape[0] // 3] * alongside[: p.shape[0] // 3],
    "a copy": lambda p, alongside: (p * 2).clone().view(-1) * alongside.view(-1),
}


def read(source, way, layout):
    model = AutoModelForCausalLM.from_pretrained(source, **({} if layout is None else {"megatron_config": layout}))
    values = {}
    for name, parameter in model.named_parameters():
        alongside = torch.linspace(0.5, 2, parameter.numel()).view(parameter.shape)
        with torch.no_grad():
            values[name] = read_scalar(WAYS[way](parameter, alongside).sum())
        loss = WAYS[way](parameter, alongside).pow(2).sum()
        model.zero_grad()
        loss.backward()
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        values[f"gradient of {name}"] = (gradient * alongside).sum().item()
    return values


@pytest.mark.parametrize("way", WAYS)
def test_reads_match_single_process(source, way):
    expected = read(source, way, None)
    layout = MegatronConfig(tp_size=2, dp_size=2, zero_stage=3)
    for values in run_ranks(read, 4, source, way, layout):
        assert values == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_torch_flatten_order_is_detected(source):
    """Seeded fault: weights that two mesh dimensions shard are flattened in the order of torch."""

    def read_in_torch_order(*args):
        dtensor_methods._is_cut_twice = lambda tensor: False
        return read(*args)

    expected = read(source, "whole", None)
    layout = MegatronConfig(tp_size=2, dp_size=2, zero_stage=3)
    for values in run_ranks(read_in_torch_order, 4, source, "whole", layout):
        assert values != pytest.approx(expected, rel=1e-3, abs=1e-2)


def add_squares(source, layout):
    """Returns the loss and the gradient norm of a step with a penalty on a flattened weight."""
    model = AutoModelForCausalLM.from_pretrained(source, **({} if layout is None else {"megatron_config": layout}))
    weight, ids = model.transformer.h[0].mlp.c_fc.weight, torch.arange(16).view(2, 8)
    if layout is not None:
        with pytest.raises(UnsupportedError, match=r"Call the weight's own flatten\(\), view\(\) or reshape\(\)."):
            torch.flatten(weight)
    scales = torch.linspace(0.5, 2, weight.numel())
    loss = model(input_ids=ids, labels=ids).loss + (weight.flatten() * scales).pow(2).mean()
    loss.backward()
    return read_scalar(loss), read_scalar(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))


def test_methods_flatten_weights_that_two_axes_shard(source):
    expected = pytest.approx(add_squares(source, None), rel=1e-4)
    layout = MegatronConfig(tp_size=2, dp_size=2, zero_stage=3)
    assert run_ranks(add_squares, 4, source, layout) == [expected] * 4


def set_first(sums):
    sums[0] = 1.0


EDITS = {
    "fill": lambda sums: sums.fill_(2.0),
    "entry": set_first,
    "slice filled": lambda sums: sums[:2].fill_(5.0),
    "slice scaled": lambda sums: sums[:2].mul_(2),
    "slice shifted": lambda sums: sums[1:3].add_(1.0),
    "flattened": lambda sums: sums.view(-1)[1:].sub_(3.0),
}


def edit_sums(source, layout):
    """Returns sums of a weight over each dim, edited in place; with tensor parallelism one of them is a partial sum."""
    model = AutoModelForCausalLM.from_pretrained(source, **({} if layout is None else {"megatron_config": layout}))
    weight, results = model.transformer.h[0].mlp.c_fc.weight.detach(), []
    for dim in (0, 1):
        for edit in EDITS.values():
            sums = weight.sum(dim)
            edit(sums)
            results.append(sums.full_tensor() if hasattr(sums, "full_tensor") else sums)
    return results


@pytest.mark.parametrize("layout", [MegatronConfig(tp_size=2), MegatronConfig(tp_size=2, dp_size=2, zero_stage=3)])
def test_edited_sums_match_single_process(source, layout):
    expected = edit_sums(source, None)
    for results in run_ranks(edit_sums, layout.tp_size * (layout.dp_size or 1), source, layout):
        for (dim, name), one, other in zip(((d, n) for d in (0, 1) for n in EDITS), results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4, msg=f"{name} of the sum over dim {dim}")

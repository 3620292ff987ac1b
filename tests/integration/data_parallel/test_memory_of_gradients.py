"""Tests of gradients that a script assigns through `.data`, accumulates over a dim, or shares with other libraries."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError
from hf_megatron.core.communication import proxy_tensor
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.torch import dtensor_methods
from tests.helpers.dp_training import count_ranks, parse_layout
from tests.helpers.training import make_batch, save_tiny, shard_batch

LAYOUTS = ["tp2", "tp2+sp", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3"]


def assign_sum(parameter):
    parameter.grad.data = parameter.grad.data + 0.5


def assign_clamped(parameter):
    gradient = parameter.grad
    gradient.data = gradient.data.clamp(-1e-3, 1e-3)


def add_through_data(parameter):
    parameter.grad.data += 0.25


def accumulate(name):
    def edit(parameter):
        parameter.grad.copy_(getattr(parameter.grad, name)(-1))

    return edit


EDITS = {
    "assigned sum": assign_sum,
    "assigned clamped": assign_clamped,
    "added through data": add_through_data,
    "cumsum": accumulate("cumsum"),
    "cumprod": accumulate("cumprod"),
    "logcumsumexp": accumulate("logcumsumexp"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


def compute_full_gradient(parameter):
    gradient = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def edit_gradients(path, text):
    """Returns the gradients after each edit, by edit and parameter."""
    model = AutoModelForCausalLM.from_pretrained(path, **({"megatron_config": parse_layout(text)} if text else {}))
    model.train()
    gradients = {}
    for name, edit in EDITS.items():
        model.zero_grad()
        batch = make_batch(0)
        model(**(shard_batch(model, batch) if text else batch)).loss.backward()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if text == "dp2":
                    with pytest.raises(UnsupportedError, match="Assign a tensor of its shape"):
                        parameter.grad.data = torch.ones(3)
                edit(parameter)
                gradients[name, key] = compute_full_gradient(parameter)
    return gradients


@pytest.mark.parametrize("text", LAYOUTS)
def test_edits_match_single_process(tiny, text):
    expected = edit_gradients(tiny, None)
    for gradients in run_ranks(edit_gradients, count_ranks(parse_layout(text)), tiny, text):
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=str(key))


@pytest.mark.parametrize("text", LAYOUTS)
def test_arrays_and_dlpack_share_no_memory(tiny, text):
    """A gathered gradient is a copy: writing to it must not be lost silently."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        model(**shard_batch(model, make_batch(0))).loss.backward()
        parameter = model.model.layers[0].self_attn.q_proj.weight
        for array in (parameter.grad.numpy(), np.asarray(parameter.grad)):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        with pytest.raises(UnsupportedError, match=r"Call full_tensor\(\) first, or clone\(\) where it has none, and"):
            torch.from_dlpack(parameter.grad)
        full = torch.from_dlpack(compute_full_gradient(parameter)).mul_(2)
        expected = compute_full_gradient(parameter) * 2
        parameter.grad.copy_(full)
        return torch.equal(compute_full_gradient(parameter), expected)

    assert all(run_ranks(on_rank, count_ranks(parse_layout(text))))


def find_writable_arrays(path, text, sabotage=None):
    """Returns the names of arrays of gradients, weights and views of both that can be written and do not count."""
    if sabotage is not None:
        sabotage()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout(text)).train()
    model(**shard_batch(model, make_batch(0))).loss.backward()
    lost = []
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        tensors = {"gradient": parameter.grad, "weight": weight, "data": parameter.data}
        tensors |= {f"view of {kind}": tensor[1:] for kind, tensor in tensors.items()}
        for kind, tensor in tensors.items():
            array = tensor.numpy()
            if array.flags.writeable:
                before = array.flat[0] + 1
                array.flat[0] = before
                lost += [f"{kind} of {name}"] if float(tensor.flatten()[0]) != float(before) else []
    return lost


@pytest.mark.parametrize("text", [*LAYOUTS, "cp2", "cp2+zero3"])
def test_arrays_are_read_only_or_edits_count(tiny, text):
    assert run_ranks(find_writable_arrays, 2, tiny, text) == [[], []]


def leave_arrays_writable():
    proxy_tensor.protect = dtensor_methods.protect = lambda array: array


@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_lost_edits_of_arrays_are_detected(tiny, text):
    assert all(run_ranks(find_writable_arrays, 2, tiny, text, leave_arrays_writable))

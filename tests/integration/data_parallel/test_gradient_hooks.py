"""Tests of user hooks that change `.grad` while gradients of bfloat16 weights are accumulated in fp32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import UnsupportedError
from tests.helpers.dp_training import parse_layout
from tests.helpers.training import gather_full_tensors, make_batch


def scale_gradient(parameter):
    parameter.grad.mul_(0.5)


def assign_gradient(parameter):
    parameter.grad = parameter.grad * 0.5


def read_norm(parameter):
    assert parameter.grad.norm() >= 0


def measure_gradient_and_update(path, hook, seeds, early):
    """Returns `.grad` after one backward per seed, and the weight update of one step, flattened over all parameters."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, megatron_config=parse_layout("tp2")
    ).train()
    optimizer = None if early else prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    if hook is not None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    if early:
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for seed in seeds:
        model(**make_batch(seed)).loss.backward()
    grads = gather_full_tensors(model, {name: parameter.grad for name, parameter in model.named_parameters()})
    optimizer.step()
    updates = gather_full_tensors(
        model, {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    )
    return [
        torch.cat([v.float().flatten() for v in values.values()]) if values else None for values in (grads, updates)
    ]


@pytest.fixture(scope="module")
def parts(tiny):
    return [run_ranks(measure_gradient_and_update, 2, tiny, None, (seed,), False)[0][0] for seed in range(2)]


@pytest.mark.parametrize("early", [True, False], ids=["before prepare_optimizer", "after"])
@pytest.mark.parametrize(
    ("hook", "factors"),
    [(scale_gradient, (0.25, 0.5)), (assign_gradient, (0.25, 0.5)), (read_norm, (1, 1)), (None, (1, 1))],
)
def test_hook_acts_once_on_accumulated_gradient(tiny, parts, hook, factors, early):
    gradient, update = run_ranks(measure_gradient_and_update, 2, tiny, hook, (0, 1), early)[0]
    expected = sum(part * factor for part, factor in zip(parts, factors, strict=True))
    assert (gradient - expected).norm() < 0.01 * expected.norm()
    # Updated weights are rounded to bfloat16.
    assert torch.dot(update, expected) == pytest.approx(float(torch.dot(expected, expected)), rel=0.02)


def hook_after_forward(path, config):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    loss = model(**make_batch(0)).loss
    weight = model.model.norm.weight
    handle = weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(UnsupportedError, match="A hook on the gradient of model.norm.weight"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    model(**make_batch(0)).loss.backward()


@pytest.mark.parametrize("layout", ["dp2", "cp2", "dp2+zero3"])
def test_hooks_after_the_forward_are_rejected(tiny, layout):
    """They would see gradients that are not reduced, as those that are registered before."""
    run_ranks(hook_after_forward, 2, tiny, parse_layout(layout))

"""Follows the cures that errors of a pipelined training step name: loss and gradients then equal a single process."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import (
    ConfigError,
    UnsupportedError,
    get_parallel_state,
    local_named_parameters,
    prepare_optimizer,
)
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.same_step import require_same_gradients, require_same_step
from tests.helpers.training import make_batch, shard_batch

BATCH = make_batch(0)
IDS = BATCH["input_ids"]


def load(path, cls=AutoModelForCausalLM, pp_size=2, options=None, **layout):
    config = ConfigUnderTest(pp_size=pp_size, **layout)
    return cls.from_pretrained(path, megatron_config=config, **(options or {})).train()


def load_single(path, cls=AutoModelForCausalLM, **options):
    return cls.from_pretrained(path, **options).train()


def test_repeated_backwards(tiny):
    """The first backward keeps the graph, of a loss and of logits."""

    def train_twice(model, batch):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        return loss

    def train_logits_twice(model, batch):
        loss = model(batch["input_ids"]).logits.sum() / 100
        loss.backward(retain_graph=True)
        return loss

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        for loss in (model(**BATCH).loss, model(IDS).logits.sum()):
            loss.backward()
            with pytest.raises(ConfigError, match=r"Call the first backward with retain_graph=True\."):
                loss.backward()
        require_same_step(model, single, BATCH, train_twice)
        require_same_step(model, single, BATCH, train_logits_twice)

    run_ranks(on_rank, 2)


def penalize_gradient(model, batch):
    loss = model(**batch).loss
    loss.backward(create_graph=True)
    norm = model.model.norm.weight.grad.square().sum()
    model.zero_grad()
    return loss + norm


def test_second_derivatives(tiny):
    """A model in a single process: no layout differentiates gradients again."""

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"differentiated again\. Load it without megatron_config\."):
            penalize_gradient(load(tiny), BATCH)
        single, plain = load_single(tiny), load_single(tiny)
        penalize_gradient(single, BATCH).backward()
        plain(**BATCH).loss.backward()
        # The penalty's own gradient.
        assert not torch.allclose(single.model.norm.weight.grad, plain.model.norm.weight.grad, rtol=1e-2)

    run_ranks(on_rank, 2)


def double(gradient):
    return gradient * 2


def double_hooked(model, batch):
    """Doubles every gradient with hooks that a forward hook registers."""
    handles = []

    def register(module, args):
        handles.extend(parameter.register_hook(double) for _, parameter in local_named_parameters(module))

    handles.append(model.register_forward_pre_hook(register))
    try:
        loss = model(**batch).loss
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()


def take_gradients(model, batch):
    """Sets the gradients that `torch.autograd.grad` returns."""
    loss = model(**batch).loss
    parameters = [parameter for _, parameter in local_named_parameters(model)]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("other", [{"dp_size": 2}, {"cp_size": 2}], ids=["dp2", "cp2"])
def test_gradients_before_their_reduction(tiny, other):
    """Hooks on parameters and `torch.autograd.grad`: gradients are read after the backward, or not reduced at all."""

    def on_rank():
        model, single = load(tiny, **other), load_single(tiny)
        with pytest.raises(UnsupportedError, match=r"Remove them, and read or change `parameter.grad` between backwa"):
            double_hooked(model, shard_batch(model, BATCH))
        model.zero_grad()
        model(**shard_batch(model, BATCH)).loss.backward()
        for _, parameter in local_named_parameters(model):
            parameter.grad *= 2
        double_hooked(single, BATCH)
        require_same_gradients(model, single)

        with pytest.raises(UnsupportedError, match=r"Call loss.backward\(\), or use dp_size=1 and cp_size=1\."):
            take_gradients(model, shard_batch(model, BATCH))
        require_same_step(model, single, BATCH)
        model = load(tiny, tp_size=2)
        for one in (model, single):
            one.zero_grad()
            take_gradients(one, BATCH)
        require_same_gradients(model, single)

    run_ranks(on_rank, 4)


def step_in_hooks(model, batch, prepare):
    """Steps each parameter's own optimizer as soon as its gradient is complete."""
    optimizers = {p: prepare(torch.optim.SGD([p], lr=0.1)) for p in model.parameters()}
    handles = [p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step()) for p in optimizers]
    try:
        model(**batch).loss.backward()
    finally:
        for handle in handles:
            handle.remove()


def test_step_of_a_prepared_optimizer_in_a_hook(tiny):
    """The step comes after the backward."""

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        before = {name: parameter.detach().clone() for name, parameter in local_named_parameters(model)}
        with pytest.raises(UnsupportedError, match=r"Call it after backward\(\) instead of in a hook\."):
            step_in_hooks(model, BATCH, prepare_optimizer)
        assert all(torch.equal(before[name], parameter) for name, parameter in local_named_parameters(model))
        model = load(tiny)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(**BATCH).loss.backward()
        optimizer.step()
        step_in_hooks(single, BATCH, lambda optimizer: optimizer)
        require_same_step(model, single, BATCH)

    run_ranks(on_rank, 2)


def test_gradients_added_before_autograd_grad(tiny):
    """`loss.backward()`, or a scale that is not announced."""

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        loss_scale = get_parallel_state(model).pipeline.loss_scale
        for is_announced in (True, False):
            loss_scale.announced = (lambda: 1.0) if is_announced else None
            for one in (model, single):
                one.zero_grad()
                one(**BATCH).loss.backward()
            if is_announced:
                with pytest.raises(UnsupportedError, match=r"Call loss.backward\(\), or do not announce the scale"):
                    take_gradients(model, BATCH)
                require_same_step(model, single, BATCH)
            else:
                take_gradients(model, BATCH)
                take_gradients(single, BATCH)
                require_same_gradients(model, single)

    run_ranks(on_rank, 2)


def train_two_batches(model, factors):
    model.zero_grad()
    for seed, factor in enumerate(factors):
        (model(**make_batch(seed)).loss * factor).backward()


def test_announced_loss_scale(tiny):
    """A scale that turns out wrong is no longer announced."""

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        loss_scale = get_parallel_state(model).pipeline.loss_scale
        loss_scale.announced = lambda: 0.5
        with pytest.raises(ConfigError, match=r"pipeline.loss_scale.announced = None` and repeat the step\."):
            train_two_batches(model, (0.5, 0.25))
        loss_scale.announced = None
        for one in (model, single):
            train_two_batches(one, (0.5, 0.25))
        require_same_gradients(model, single)

    run_ranks(on_rank, 2)


def call_functionally(model, batch):
    parameters = dict(model.named_parameters())
    scaled = {name: parameter * 1.5 for name, parameter in parameters.items()}
    return torch.func.functional_call(model, scaled, args=(), kwargs=batch).loss


def differentiate_functionally(model, batch):
    def compute_loss(parameters):
        return torch.func.functional_call(model, parameters, args=(), kwargs=batch).loss

    return torch.func.grad(compute_loss)(dict(model.named_parameters()))


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}], ids=["tp2", "pp2", "dp2"])
def test_functional_gradients(tiny, layout):
    """The model itself and `loss.backward()`."""

    def on_rank():
        model = load(tiny, **({"pp_size": 1} | layout))
        with pytest.raises(UnsupportedError, match=r"Call the model itself and loss.backward\(\)\."):
            differentiate_functionally(model, shard_batch(model, BATCH))
        require_same_step(model, load_single(tiny), BATCH)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2}, {"cp_size": 2}], ids=["pp2", "dp2", "cp2"])
def test_functional_calls(tiny, layout):
    """The model itself, or tensor parallelism."""

    def on_rank():
        model, single = load(tiny, **({"pp_size": 1} | layout)), load_single(tiny)
        with pytest.raises(UnsupportedError, match="Call the model itself, or use tensor parallelism only"):
            call_functionally(model, shard_batch(model, BATCH))
        require_same_step(model, single, BATCH)
        require_same_step(load(tiny, pp_size=1, tp_size=2), single, BATCH, call_functionally)

    run_ranks(on_rank, 2)

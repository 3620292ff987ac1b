"""Tests that the cures which errors of data parallelism name let the loop continue as in a single process."""

import contextlib
import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_megatron import ConfigError, UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.training import PatternRuns, make_batch, parse_layout, shard_batch

LOOP_PATTERNS = {}


def loop_pattern(*layouts):
    def register(function):
        LOOP_PATTERNS[function.__name__] = function, layouts
        return function

    return register


@contextlib.contextmanager
def expect_error(message, kind=UnsupportedError):
    with pytest.raises(kind, match=re.escape(message)):
        yield


def is_parallel(loop):
    return parallel_state(loop.model) is not None


def local_batch(loop, seed=0):
    return shard_batch(loop.model, make_batch(seed))


def step_with_clamped_gradients(loop, seed=0):
    """Changes `parameter.grad` between backward() and step()."""
    loop.backward(seed)
    for parameter in loop.model.parameters():
        parameter.grad.clamp_(-1e-3, 1e-3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


CHANGE_GRADIENT = "read or change `parameter.grad` between backward() and step()"


@loop_pattern("dp2", "dp2+zero3")
def change_gradient_without_hook(loop):
    if is_parallel(loop):
        handle = loop.model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        with expect_error(f"Remove it, and {CHANGE_GRADIENT}."):
            loop.step(0)
        handle.remove()
    step_with_clamped_gradients(loop)


@loop_pattern("dp2", "dp2+zero3")
def change_gradient_without_module_hook(loop):
    if is_parallel(loop):
        mlp = loop.model.model.layers[0].mlp
        handle = mlp.register_full_backward_hook(lambda module, new, old: (new[0] * 2,))
        with expect_error(f"Remove it, and {CHANGE_GRADIENT}, or train with pipeline parallelism only."):
            loop.step(0)
        handle.remove()
    step_with_clamped_gradients(loop)


@loop_pattern("dp2", "dp2+zero3")
def change_gradient_without_activation_hook(loop):
    if is_parallel(loop):
        hidden = loop.model(**local_batch(loop), output_hidden_states=True).hidden_states[1]
        with expect_error(f"Remove it, and {CHANGE_GRADIENT}, or train with dp_size=1 and cp_size=1."):
            hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    step_with_clamped_gradients(loop)


@loop_pattern("dp2", "dp2+zero3")
def read_gradients_of_backward(loop):
    if is_parallel(loop):
        with expect_error("Call loss.backward() and read `parameter.grad`."):
            torch.autograd.grad(loop.loss(0), list(loop.model.parameters()))
    loop.backward(0)
    loop.see_gradients("of backward()")
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@loop_pattern("dp2", "dp2+zero0", "dp2+zero2")
def train_head_of_model(loop):
    torch.manual_seed(3)
    head = nn.Linear(32, 3)

    def loss(seed):
        rows = local_batch(loop, seed)
        hidden = loop.model(input_ids=rows["input_ids"], output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(head(hidden[:, -1]), rows["input_ids"][:, 0] % 3)

    if is_parallel(loop):
        with expect_error("Make it a parameter of the model before prepare_optimizer(...), freeze it, or train with"):
            loss(0).backward()
        loop.model.zero_grad()
    loop.model.classifier = head
    optimizer = loop.prepare(loop.model.parameters())
    for seed in range(2):
        loss(seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.see("head", head.weight)
    del loop.model.classifier


@loop_pattern("dp2", "dp2+zero3")
def use_frozen_head(loop):
    torch.manual_seed(3)
    head = nn.Linear(32, 3)

    def loss(seed):
        rows = local_batch(loop, seed)
        hidden = loop.model(input_ids=rows["input_ids"], output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(head(hidden[:, -1]), rows["input_ids"][:, 0] % 3)

    if is_parallel(loop):
        with expect_error("prepare_optimizer(...), freeze it, or train with dp_size=1 and cp_size=1."):
            loss(0).backward()
        loop.model.zero_grad()
    head.requires_grad_(False)
    loss(0).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@loop_pattern("dp2", "dp2+zero3", "pp2+dp2")
def disable_embedding_option(loop):
    embedding = loop.model.get_input_embeddings()
    if is_parallel(loop):
        embedding.scale_grad_by_freq = True
        with expect_error("Disable it, or train with dp_size=1 and pp_size=1."):
            loop.step(0)
        embedding.scale_grad_by_freq = False
    loop.step(0)


@loop_pattern("dp2", "dp2+zero0")
def prepare_optimizer_before_step(loop):
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.05)
    loop.backward(0)
    if is_parallel(loop):
        with expect_error(
            "Pass it through accelerator.prepare(...) or hf_megatron.prepare_optimizer(optimizer).", ConfigError
        ):
            optimizer.step()
        optimizer = prepare_optimizer(optimizer)
    optimizer.step()
    optimizer.zero_grad()


@loop_pattern("dp2")
def train_second_model_instead_of_copy(loop):
    if is_parallel(loop):
        duplicate = copy.deepcopy(loop.model)
        with expect_error("Load it a second time with from_pretrained(..., megatron_config=...)."):
            duplicate(**local_batch(loop))
    loop.step(0)
    config = parse_layout("dp2") if is_parallel(loop) else None
    loop.model = AutoModelForCausalLM.from_pretrained(loop.path, megatron_config=config).train()
    loop.optimizer = loop.prepare(loop.model.parameters())
    loop.step(1)


@loop_pattern("dp2", "dp2+zero3", "pp2")
def call_model_itself(loop):
    if is_parallel(loop):
        others = {name: parameter * 1.01 for name, parameter in loop.model.named_parameters()}
        with expect_error("Call the model itself, or use tensor parallelism only."):
            torch.func.functional_call(loop.model, others, args=(), kwargs=local_batch(loop))
    loop.step(0)


@loop_pattern("dp2", "tp2", "pp2")
def create_optimizer_per_model(loop):
    config = None if not is_parallel(loop) else parallel_state(loop.model).config
    other = AutoModelForCausalLM.from_pretrained(loop.path, megatron_config=config).train()
    if is_parallel(loop):
        together = torch.optim.SGD([*loop.model.parameters(), *other.parameters()], lr=0.05)
        with expect_error("Create one optimizer per model.", ConfigError):
            prepare_optimizer(together)
    loop.step(0)
    loop.model, loop.optimizer = other, loop.prepare(other.parameters())
    loop.step(1)


class OwnSGD(torch.optim.SGD):
    """An optimizer class that the library does not know."""


@loop_pattern("dp2", "tp2", "dp2+zero3")
def declare_elementwise(loop):
    optimizer = OwnSGD(loop.model.parameters(), lr=0.05)
    if is_parallel(loop):
        with expect_error(
            "or hf_megatron.prepare_optimizer(optimizer, elementwise=True) if it updates each entry from that entry "
            "only."
        ):
            prepare_optimizer(optimizer)
        prepare_optimizer(optimizer, elementwise=True)
    loop.optimizer = optimizer
    loop.step(0)
    loop.step(1)


@loop_pattern("pp2")
def declare_elementwise_on_stages(loop):
    optimizer = OwnSGD(loop.model.parameters(), lr=0.05)
    if is_parallel(loop):
        with expect_error(
            "Use pp_size=1, or hf_megatron.prepare_optimizer(optimizer, elementwise=True) if it steps on each "
            "parameter separately."
        ):
            prepare_optimizer(optimizer)
        prepare_optimizer(optimizer, elementwise=True)
    loop.optimizer = optimizer
    loop.step(0)
    loop.step(1)


@loop_pattern("dp2+zero3")
def read_output_with_hook(loop):
    """Adds a loss on the output of an MLP."""
    mlp, outputs = loop.model.model.layers[0].mlp, []
    if is_parallel(loop):
        loop.step(3)
        with expect_error("Read its output with a forward hook, or load the model with zero_stage=2."), torch.no_grad():
            mlp(torch.zeros(1, 3, 32))
    else:
        loop.step(3)
    handle = mlp.register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = loop.loss(0)
    handle.remove()
    (loss + outputs[0].pow(2).mean()).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@loop_pattern("dp2+zero3")
def restore_state_dict(loop):
    """Restores the weights of the first step."""
    loop.step(0)
    if is_parallel(loop):
        with expect_error("Keep `copy.deepcopy(model.state_dict())`, or load the model a second time."):
            copy.deepcopy(loop.model)
    kept = copy.deepcopy(loop.model.state_dict())
    loop.step(1)
    loop.model.load_state_dict(kept)
    loop.step(2)


@loop_pattern("dp2+zero3", "pp2")
def edit_weights_after_backward(loop):
    def edit():
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.mul_(0.99)

    if is_parallel(loop):
        loss = loop.loss(0)
        edit()
        with expect_error("Edit weights after backward().", RuntimeError):
            loss.backward()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.div_(0.99)
        loop.model.zero_grad()
    loop.backward(0)
    edit()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


RUNS = [(name, text) for name, (_, layouts) in LOOP_PATTERNS.items() for text in layouts]
LAYOUTS = {text for _, text in RUNS}


@pytest.fixture(scope="module")
def runs(tiny):
    functions = {name: function for name, (function, _) in LOOP_PATTERNS.items()}
    excluded = {
        text: {name for name, (_, layouts) in LOOP_PATTERNS.items() if text not in layouts} for text in LAYOUTS
    }
    return {
        text: PatternRuns(tiny, {name: function for name, function in functions.items() if name not in excluded[text]})
        for text in LAYOUTS
    }


@pytest.mark.parametrize(("name", "text"), RUNS)
def test_cures_match_single_process(runs, name, text):
    runs[text].compare(text, name)

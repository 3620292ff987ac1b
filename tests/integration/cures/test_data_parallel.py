"""Tests that the cures which errors of data parallelism name let the loop continue as in a single process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_megatron import ConfigError, prepare_optimizer
from hf_megatron.compat.transformers_models import CACHE_OUTPUT
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.cure_patterns import CurePatterns, expect_error, is_parallel
from tests.helpers.training import count_ranks, make_batch, parse_layout, shard_batch

cure_pattern = CurePatterns()


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


@cure_pattern("dp2", "dp2+zero3")
def change_gradient_without_hook(loop):
    if is_parallel(loop):
        handle = loop.model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        with expect_error(f"Remove it, and {CHANGE_GRADIENT}."):
            loop.step(0)
        handle.remove()
    step_with_clamped_gradients(loop)


@cure_pattern("dp2", "dp2+zero3")
def change_gradient_without_module_hook(loop):
    if is_parallel(loop):
        mlp = loop.model.model.layers[0].mlp
        handle = mlp.register_full_backward_hook(lambda module, new, old: (new[0] * 2,))
        with expect_error(f"Remove it, and {CHANGE_GRADIENT}, or train with pipeline parallelism only."):
            loop.step(0)
        handle.remove()
    step_with_clamped_gradients(loop)


@cure_pattern("dp2", "dp2+zero3")
def change_gradient_without_activation_hook(loop):
    if is_parallel(loop):
        hidden = loop.model(**local_batch(loop), output_hidden_states=True).hidden_states[1]
        with expect_error(f"Remove it, and {CHANGE_GRADIENT}, or train with dp_size=1 and cp_size=1."):
            hidden.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    step_with_clamped_gradients(loop)


@cure_pattern("dp2", "dp2+zero3")
def read_gradients_of_backward(loop):
    if is_parallel(loop):
        with expect_error("Call loss.backward() and read `parameter.grad`."):
            torch.autograd.grad(loop.loss(0), list(loop.model.parameters()))
    loop.backward(0)
    loop.see_gradients("of backward()")
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@cure_pattern("dp2", "dp2+zero0", "dp2+zero2")
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


@cure_pattern("dp2", "dp2+zero3")
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


@cure_pattern("dp2", "dp2+zero3", "pp2+dp2")
def disable_embedding_option(loop):
    embedding = loop.model.get_input_embeddings()
    if is_parallel(loop):
        embedding.scale_grad_by_freq = True
        with expect_error("Disable it, or train with dp_size=1 and pp_size=1."):
            loop.step(0)
        embedding.scale_grad_by_freq = False
    loop.step(0)


@cure_pattern("dp2", "dp2+zero0")
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


@cure_pattern("dp2")
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


@cure_pattern("dp2", "dp2+zero3", "pp2")
def call_model_itself(loop):
    if is_parallel(loop):
        others = {name: parameter * 1.01 for name, parameter in loop.model.named_parameters()}
        with expect_error("Call the model itself, or use tensor parallelism only."):
            torch.func.functional_call(loop.model, others, args=(), kwargs=local_batch(loop))
    loop.step(0)


@cure_pattern("dp2", "tp2", "pp2")
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


def train_with_unknown_optimizer(loop, cure, **declaration):
    """Prepares an optimizer that raises, and declares what it needs, as the error says."""
    optimizer = OwnSGD(loop.model.parameters(), lr=0.05)
    if is_parallel(loop):
        with expect_error(cure):
            prepare_optimizer(optimizer)
        prepare_optimizer(optimizer, **declaration)
    loop.optimizer = optimizer
    loop.step(0)
    loop.step(1)


@cure_pattern("dp2", "tp2", "dp2+zero3")
def declare_elementwise(loop):
    train_with_unknown_optimizer(
        loop,
        "or prepare_optimizer(optimizer, elementwise=True) if it updates each entry from that entry only.",
        elementwise=True,
    )


@cure_pattern("dp2", "tp2", "dp2+zero3")
def declare_layer_wise(loop):
    train_with_unknown_optimizer(
        loop,
        "Call hf_megatron.prepare_optimizer(optimizer, layer_wise=True) if it updates each parameter from that "
        "parameter and its gradient only, or",
        layer_wise=True,
    )


@cure_pattern("pp2")
def declare_layer_wise_on_stages(loop):
    train_with_unknown_optimizer(
        loop,
        "Use pp_size=1, or call hf_megatron.prepare_optimizer(optimizer, layer_wise=True) if it steps on each "
        "parameter separately.",
        layer_wise=True,
    )


class EagerMomentum(OwnSGD):
    """SGD that creates its momentum in the constructor, or later."""

    def __init__(self, parameters, lr, in_constructor):
        super().__init__(parameters, lr=lr, momentum=0.9)
        for group in self.param_groups if in_constructor else ():
            for parameter in group["params"]:
                # As Adagrad, whose `step` of 0 shows that it has not stepped.
                self.state[parameter] = {"step": 0, "momentum_buffer": torch.zeros_like(parameter)}


@cure_pattern("dp2", "tp2")
def create_state_in_first_step(loop):
    if is_parallel(loop):
        with expect_error("Create the state in the first step, as torch's Adam does."):
            eager = EagerMomentum(loop.model.parameters(), 0.05, in_constructor=True)
            prepare_optimizer(eager, layer_wise=True)
    loop.optimizer = EagerMomentum(loop.model.parameters(), 0.05, in_constructor=False)
    if is_parallel(loop):
        prepare_optimizer(loop.optimizer, layer_wise=True)
    loop.step(0)
    loop.step(1)


@cure_pattern("dp2+zero3")
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


@cure_pattern("dp2+zero3")
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


@cure_pattern("dp2+zero3", "pp2")
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


@pytest.fixture(scope="module")
def runs(tiny):
    return cure_pattern.make_runs(tiny)


@pytest.mark.parametrize(("name", "text"), cure_pattern.parameters)
def test_cures_match_single_process(runs, name, text):
    runs[text].compare(text, name)


@pytest.mark.parametrize("text", ["dp2+zero3", "tp2+dp2+zero3"])
def test_layer_called_after_the_model(tiny, text):
    """The output of a second call of a layer is part of the loss."""

    def measure(layout):
        model = LlamaForCausalLM.from_pretrained(tiny, megatron_config=layout).train()
        layer, calls = model.model.layers[1], []
        if layout is not None:
            with expect_error("Call the model first, or load it with zero_stage=2."), torch.no_grad():
                layer(torch.zeros(1, 3, 32))
        hook = layer.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        loss = model(**shard_batch(model, make_batch(0))).loss
        hook.remove()
        [(args, kwargs)] = calls
        output = layer(*(value.detach() for value in args), **{**kwargs, CACHE_OUTPUT: None})
        # All ranks have equally many samples, so that the mean over ranks is the global mean.
        (loss + output.pow(2).mean()).backward()
        return loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))

    layout, expected = parse_layout(text), pytest.approx(measure(None), rel=1e-4)
    assert run_ranks(measure, count_ranks(layout), layout) == [expected] * count_ranks(layout)


class PromptedLlama(LlamaForCausalLM):
    """Llama with a trained prompt on its embeddings."""

    def __init__(self, config):
        super().__init__(config)
        self.prompt = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, input_ids, labels):
        return super().forward(inputs_embeds=self.get_input_embeddings()(input_ids) * self.prompt, labels=labels)


def train_prompt(plain, path, text):
    config = None if text is None else parse_layout(text)
    if config is not None:
        model = LlamaForCausalLM.from_pretrained(plain, megatron_config=config).train()
        prompt, rows = torch.ones(32, requires_grad=True), shard_batch(model, make_batch(0))
        embeds = torch.randn(*rows["input_ids"].shape, 32)
        message = (
            "Make them parameters of the model before from_pretrained(..., megatron_config=...), or train them with "
            "dp_size=1 and cp_size=1."
        )
        with expect_error(message):
            model(inputs_embeds=embeds * prompt, labels=rows["labels"])
    model = PromptedLlama.from_pretrained(path, megatron_config=config).train()
    optimizer, values = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)), []
    for seed in range(2):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        loss.backward()
        values += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3"])
def test_trained_prompt_as_parameter(tiny, tmp_path, text):
    PromptedLlama.from_pretrained(tiny).save_pretrained(tmp_path)
    expected = pytest.approx(train_prompt(tiny, tmp_path, None), rel=1e-4)
    assert run_ranks(train_prompt, 2, tiny, tmp_path, text) == [expected] * 2


def make_loader(seed):
    """Returns a DataLoader that shuffles with a seed."""
    samples = [{name: value[row] for name, value in make_batch(0, rows=8).items()} for row in range(8)]
    return DataLoader(samples, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def train_on_batches(model, optimizer, batches):
    values = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        values += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_shuffled_batches_of_a_replica(tiny, text, is_prepared):
    def on_rank():
        model = LlamaForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        optimizer, loader, rank = torch.optim.SGD(model.parameters(), lr=0.1), make_loader(5), dist.get_rank()
        cure = "Pass the DataLoader through accelerator.prepare(...), or shuffle it with the same seed on all ranks."
        with expect_error(cure, ConfigError):
            model(**next(iter(make_loader(rank))))
        if is_prepared:
            model, optimizer, loader = Accelerator(cpu=True).prepare(model, optimizer, make_loader(5 + rank))
        else:
            optimizer = prepare_optimizer(optimizer)
        batches = list(loader)
        return train_on_batches(model, optimizer, batches), batches

    results = run_ranks(on_rank, 2)
    batches = results[0][1]
    assert len({int(row[0]) * 64 + int(row[1]) for batch in batches for row in batch["input_ids"]}) == 8
    model = LlamaForCausalLM.from_pretrained(tiny).train()
    expected = train_on_batches(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    assert [values for values, _ in results] == [pytest.approx(expected, rel=1e-4)] * 2

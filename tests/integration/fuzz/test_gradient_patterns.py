"""Tests of unusual uses of `.grad` in training loops, compared with the single-process run."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_megatron
from hf_megatron import UnsupportedError, local_named_parameters
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import parse_layout
from tests.helpers.training import (
    FULL_BATCH_LAYOUTS,
    LAYOUTS,
    PIPELINES,
    PatternRuns,
    make_batch,
    make_parameters,
    shard_batch,
)

LOOP_PATTERNS = {}
_NAMES = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_")


def get_unpatched_functions():
    """Returns the original torch functions without the patches of this library."""
    hf_megatron.disable()
    functions = [getattr(torch.nn.utils, name) for name in _NAMES]
    hf_megatron.enable()
    return functions


def loop_pattern(function):
    LOOP_PATTERNS[function.__name__] = function
    return function


IMPOSSIBLE = {
    # FSDP2 swaps parameters between forward and backward and unshards them only inside the model's forward.
    "zero3": {
        "sets_gradients_to_none_before_backward",
        "assigns_constants_between_forward_and_backward",
        "passes_scaled_embeddings",
    },
    # A rank has only the gradient norms of its own stage.
    "pp": {"reads_gradients"},
}


@pytest.fixture(scope="module")
def runs(tiny):
    return PatternRuns(tiny, LOOP_PATTERNS, IMPOSSIBLE)


# Clearing gradients


@loop_pattern
def sets_gradients_to_none_before_backward(loop):
    for seed in range(3):
        loss = loop.loss(seed)
        for parameter in loop.model.parameters():
            parameter.grad = None
        loss.backward()
        loop.optimizer.step()


@loop_pattern
def deletes_some_gradients(loop):
    loop.backward(0)
    for parameter in loop.parameters("mlp"):
        del parameter.grad
    loop.optimizer.step()
    loop.backward(1)
    for parameter in loop.parameters("norm"):
        parameter.grad = None
    loop.backward(2)
    loop.optimizer.step()


@loop_pattern
def zeroes_model_gradients(loop):
    for seed in range(2):
        loop.model.zero_grad(set_to_none=False)
        loop.backward(seed)
        loop.optimizer.step()


@loop_pattern
def zeroes_each_gradient(loop):
    for seed in range(2):
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        loop.backward(seed)
        loop.optimizer.step()


# Editing gradients


@loop_pattern
def scales_and_adds(loop):
    for seed in range(2):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5).div_(3.0).add_(parameter.detach(), alpha=0.01)
            parameter.grad += 0.001
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def assigns_gradients(loop):
    for seed in range(2):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            parameter.grad = parameter.grad * 0.3 + parameter.detach() * 0.1
        loop.backward(seed + 10)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def assigns_gradient_statistics(loop):
    for seed in range(2):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            gradient = parameter.grad.sign() * parameter.grad.abs().mean()
            parameter.grad = gradient - parameter.grad.mean(0, keepdim=True)
        loop.see(f"norm {seed}", torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def assigns_means(loop):
    for seed in range(2):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            parameter.grad = parameter.grad.mean(0, keepdim=True).expand_as(parameter).clone()
        loop.see(f"norm {seed}", torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def assigns_constants_between_forward_and_backward(loop):
    for seed in range(2):
        loss = loop.loss(seed)
        for parameter in loop.model.parameters():
            parameter.grad = torch.ones_like(parameter) * 0.01
        loss.backward()
        loop.optimizer.step()


@loop_pattern
def foreach_edits(loop):
    loop.backward(0)
    gradients = [parameter.grad for parameter in loop.model.parameters()]
    torch._foreach_mul_(gradients, 0.25)
    torch._foreach_add_(gradients, [parameter.detach() for parameter in loop.model.parameters()], alpha=0.01)
    torch._foreach_clamp_max_(gradients, 0.02)
    loop.optimizer.step()


@loop_pattern
def edits_gradients_across_entries(loop):
    loop.backward(0)
    for parameter in loop.model.parameters():
        parameter.grad.sub_(parameter.grad.mean())
        parameter.grad.copy_(parameter.grad.flip(0))
    loop.optimizer.step()


@loop_pattern
def averages_gradients_over_two_losses(loop):
    loop.backward(0)
    first = [parameter.grad.clone() for parameter in loop.model.parameters()]
    loop.optimizer.zero_grad()
    loop.backward(1)
    for parameter, other in zip(loop.model.parameters(), first, strict=True):
        parameter.grad = (parameter.grad + other) / 2
    loop.optimizer.step()


# Reading gradients


@loop_pattern
def reads_gradients(loop):
    for seed in range(2):
        loop.backward(seed)
        loop.see_gradients(f"step {seed}")
        norms = [parameter.grad.norm() for parameter in loop.model.parameters()]
        loop.see("norm", torch.stack([torch.as_tensor(_plain(norm)) for norm in norms]).norm())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


# Clipping with functions imported before this library


@loop_pattern
def clips_with_unpatched_functions(loop):
    clip_grad_norm_, get_total_norm, clip_grads_with_norm_, clip_grad_value_ = get_unpatched_functions()
    for seed in range(2):
        loop.backward(seed)
        parameters = list(loop.model.parameters())
        loop.see("norm", clip_grad_norm_(parameters, 0.5))
        loop.see("norm of a part", get_total_norm([parameter.grad for parameter in loop.parameters("norm")]))
        loop.see("largest", get_total_norm((parameter.grad for parameter in parameters), float("inf")))
        clip_grads_with_norm_(loop.parameters("norm"), 0.1, get_total_norm([p.grad for p in loop.parameters("norm")]))
        clip_grad_value_(parameters, 1e-3)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def _plain(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Losses


@loop_pattern
def computes_penalty_before_loss(loop):
    for seed in range(2):
        penalty = sum(_plain(parameter.pow(2).sum()) for parameter in loop.model.parameters())
        loss = loop.loss(seed)
        ((loss + 0.1 * penalty) / 4).backward()
        loop.losses.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def compute_external_loss(loop, seed):
    """Returns a loss computed outside the model, with equally many samples on every rank."""
    ids = shard_batch(loop.model, make_batch(seed))["input_ids"]
    logits = loop.model(input_ids=ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@loop_pattern
def backpropagates_external_loss_twice(loop):
    loss = compute_external_loss(loop, 0)
    loss.backward(retain_graph=True)
    (loss / 3).backward()
    loop.optimizer.step()


@loop_pattern
def adds_external_loss(loop):
    (loop.loss(0) + compute_external_loss(loop, 1)).backward()
    loop.optimizer.step()


@loop_pattern
def multiplies_losses_from_two_models(loop):
    state = parallel_state(loop.model)
    config = {} if state is None else {"megatron_config": state.config}
    other = AutoModelForCausalLM.from_pretrained(loop.path, **config).train()
    for seed in range(2):
        (loop.loss(seed) * other(**shard_batch(other, make_batch(seed + 2))).loss).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def two_forwards_two_backwards(loop):
    for seed in (0, 2):
        first, second = loop.loss(seed), loop.loss(seed + 1)
        (3 * second).backward()
        (first / 2).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def accumulates_unevenly(loop):
    for seeds in ((0,), (1, 2, 3), (4, 5)):
        for seed in seeds:
            waits = seed != seeds[-1] and hasattr(loop.model, "no_sync")
            with loop.model.no_sync() if waits else contextlib.nullcontext():
                loop.backward(seed, 1 / len(seeds))
            loop.model.eval()
            with torch.no_grad():
                loop.loss(seed + 20)
            loop.model.train()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def accumulates_with_checkpointing(loop):
    loop.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for seed in (0, 2):
        loop.step(seed, seed + 1)
    loop.model.gradient_checkpointing_disable()


@loop_pattern
def freezes_between_microbatches(loop):
    loop.backward(0)
    for parameter in loop.parameters("mlp"):
        parameter.requires_grad_(False)
    loop.step(1)
    loop.model.requires_grad_(True)
    loop.step(2)


# Trained inputs


@loop_pattern
def trains_inputs(loop):
    all_inputs = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(0))
    for seed in range(2):
        samples = shard_batch(loop.model, {"x": all_inputs, **make_batch(seed)})
        inputs = samples["x"].clone().requires_grad_()
        loss = loop.model(inputs_embeds=inputs, labels=samples["labels"]).loss
        loss.backward()
        loop.losses.append(loss.item())
        expected = shard_batch(loop.model, {"x": torch.arange(4)})["x"]
        loop.rows(f"inputs {seed}", inputs.grad, expected)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def passes_scaled_embeddings(loop):
    for seed in range(2):
        samples = shard_batch(loop.model, make_batch(seed))
        inputs = loop.model.get_input_embeddings()(samples["input_ids"]) * 1.5
        loss = loop.model(inputs_embeds=inputs, labels=samples["labels"]).loss
        loss.backward()
        loop.losses.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


# Unsupported with data parallelism

PARTIAL = {}


def partial(message):
    def register(function):
        PARTIAL[function.__name__] = function, message
        return function

    return register


@partial("averaged over data-parallel ranks")
def calls_autograd_grad_per_parameter(loop):
    parameters = list(loop.model.parameters())
    loss = loop.loss(0)
    for index, parameter in enumerate(parameters):
        [parameter.grad] = torch.autograd.grad(loss, [parameter], retain_graph=index < len(parameters) - 1)
    loop.optimizer.step()


@partial("averaged over data-parallel ranks")
def calls_autograd_grad_on_external_loss(loop):
    parameters = list(loop.model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(compute_external_loss(loop, 0), parameters), strict=True
    ):
        parameter.grad = gradient
    loop.optimizer.step()


@partial("averaged over data-parallel ranks")
def runs_backward_with_inputs(loop):
    loop.loss(0).backward(inputs=loop.parameters("mlp"))
    assert all(
        (parameter.grad is None) == ("mlp" not in name) for name, parameter in local_named_parameters(loop.model)
    )
    loop.optimizer.step()


@partial("A hook on the gradient of")
def squares_gradients_in_hooks(loop):
    """Hooks are called once per gradient, not per microbatch, which squaring would reveal."""
    calls = []
    with contextlib.ExitStack() as hooks:
        for parameter in loop.model.parameters():
            hooks.enter_context(parameter.register_hook(lambda g: calls.append(1) or g * g.abs()))
        (loop.loss(0) / 2).backward()
    assert len(calls) == len(list(local_named_parameters(loop.model)))
    loop.optimizer.step()


@partial("Hooks on the gradients of parameters")
def scales_gradients_in_late_hooks(loop):
    """The hooks are registered between forward and backward."""
    loss = loop.loss(0)
    with contextlib.ExitStack() as hooks:
        for parameter in loop.model.parameters():
            hooks.enter_context(parameter.register_hook(lambda gradient: gradient * 2))
        loss.backward()
    loop.optimizer.step()


@partial("A hook on the gradient of")
def steps_in_hooks(loop):
    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-2)

    with contextlib.ExitStack() as hooks:
        for parameter in loop.model.parameters():
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(step))
        (loop.loss(0) + compute_external_loss(loop, 1)).backward()


@partial("Make them parameters of the model")
def differentiates_prompt(loop):
    drawn = shard_batch(loop.model, {"x": torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(7))})["x"]
    prompt = torch.ones(32, requires_grad=True)
    labels = shard_batch(loop.model, make_batch(0))["labels"]
    loop.see(
        "asked", torch.autograd.grad(loop.model(inputs_embeds=drawn * prompt, labels=labels).loss / 4, [prompt])[0]
    )
    loop.model(inputs_embeds=drawn * prompt).logits.float().square().mean().backward()
    loop.see("of logits", prompt.grad)
    loop.model.zero_grad()


@pytest.fixture(scope="module")
def partial_runs(tiny):
    return PatternRuns(tiny, {name: function for name, (function, _) in PARTIAL.items()})


@pytest.mark.parametrize("text", FULL_BATCH_LAYOUTS)
@pytest.mark.parametrize("name", PARTIAL)
def test_matches_single_process_on_global_batch(partial_runs, text, name):
    partial_runs.compare(text, name)


@pytest.mark.parametrize("name", PARTIAL)
def test_raises_with_data_parallelism(partial_runs, name):
    partial_runs.refused("pp2+dp2", name, PARTIAL[name][1])


@pytest.mark.parametrize(("name", "text"), make_parameters(LOOP_PATTERNS, LAYOUTS + PIPELINES, IMPOSSIBLE))
def test_matches_single_process(runs, text, name):
    runs.compare(text, name)


def use_cleared_gradient(path):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("dp2")).train()
    weight = model.model.norm.weight
    gradient_ids = []
    for seed in range(3):
        model(**shard_batch(model, make_batch(seed))).loss.backward()
        gradient_ids.append(id(weight.grad))
        model.zero_grad()
    assert len(set(gradient_ids)) == 1, "one tensor stands for all gradients that nobody keeps"
    model(**shard_batch(model, make_batch(0))).loss.backward()
    gradient = weight.grad
    model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"clone\(\)"):
        gradient.norm()
    model(**shard_batch(model, make_batch(1))).loss.backward()
    with pytest.raises(UnsupportedError, match=r"clone\(\)"):
        gradient.norm()
    return weight.grad.norm().item() > 0


def test_cleared_gradient_raises_on_use(tiny):
    assert run_ranks(use_cleared_gradient, 2, tiny) == [True, True]

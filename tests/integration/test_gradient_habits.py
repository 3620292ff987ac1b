"""Gradients as PyTorch has them: what loops do to `.grad` besides the usual, against one process."""

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_megatron
from hf_megatron import UnsupportedError
from hf_megatron.verify.ranks import run_ranks

from .dp_training import layout, ranks_of
from .habits import LAYOUTS, SPLIT, Loop, Runs, batch, full, own_rows, save_tiny

HABITS = {}
_NAMES = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_", "clip_grad_value_")


def early_names():
    """Functions as torch made them, whatever was put in their place under their names since."""
    hf_megatron.disable()
    names = [getattr(torch.nn.utils, name) for name in _NAMES]
    hf_megatron.enable()
    return names


def habit(function):
    HABITS[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return Runs(path, HABITS)


# Taking gradients away


@habit
def sets_gradients_to_none(loop):
    for seed in range(3):
        for parameter in loop.model.parameters():
            parameter.grad = None
        loop.backward(seed)
        loop.optimizer.step()


@habit
def sets_gradients_to_none_before_backward(loop):
    for seed in range(3):
        loss = loop.loss(seed)
        for parameter in loop.model.parameters():
            parameter.grad = None
        loss.backward()
        loop.optimizer.step()


@habit
def deletes_the_gradients_of_some(loop):
    loop.backward(0)
    for parameter in loop.parameters("mlp"):
        del parameter.grad
    loop.optimizer.step()
    loop.backward(1)
    for parameter in loop.parameters("norm"):
        parameter.grad = None
    loop.backward(2)
    loop.optimizer.step()


@habit
def zeroes_gradients_of_the_model(loop):
    for seed in range(2):
        loop.model.zero_grad(set_to_none=False)
        loop.backward(seed)
        loop.optimizer.step()


@habit
def zeroes_then_freezes(loop):
    loop.step(0)
    loop.backward(1)
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    for parameter in loop.parameters("mlp"):
        parameter.requires_grad_(False)
    for seed in (2, 3):
        loop.backward(seed)
        loop.optimizer.step()
        loop.model.zero_grad(set_to_none=False)


@habit
def zeroes_each_gradient(loop):
    for seed in range(2):
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        loop.backward(seed)
        loop.optimizer.step()


# Editing gradients


@habit
def scales_and_adds(loop):
    for seed in range(2):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.5).div_(3.0).add_(parameter.detach(), alpha=0.01)
            parameter.grad += 0.001
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@habit
def assigns_gradients(loop):
    for seed in range(2):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            parameter.grad = parameter.grad * 0.3 + parameter.detach() * 0.1
        loop.backward(seed + 10)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@habit
def assigns_zeros_between_forward_and_backward(loop):
    for seed in range(2):
        loss = loop.loss(seed)
        for parameter in loop.model.parameters():
            parameter.grad = torch.ones_like(parameter) * 0.01
        loss.backward()
        loop.optimizer.step()


@habit
def foreach_edits(loop):
    loop.backward(0)
    gradients = [parameter.grad for parameter in loop.model.parameters()]
    torch._foreach_mul_(gradients, 0.25)
    torch._foreach_add_(gradients, [parameter.detach() for parameter in loop.model.parameters()], alpha=0.01)
    torch._foreach_clamp_max_(gradients, 0.02)
    loop.optimizer.step()


@habit
def edits_what_is_no_entry_of_its_own(loop):
    loop.backward(0)
    for parameter in loop.model.parameters():
        parameter.grad.sub_(parameter.grad.mean())
        parameter.grad.copy_(parameter.grad.flip(0))
    loop.optimizer.step()


@habit
def keeps_gradients_of_two_losses(loop):
    loop.backward(0)
    first = [parameter.grad.clone() for parameter in loop.model.parameters()]
    loop.optimizer.zero_grad()
    loop.backward(1)
    for parameter, other in zip(loop.model.parameters(), first, strict=True):
        parameter.grad = (parameter.grad + other) / 2
    loop.optimizer.step()


# Reading gradients


@habit
def reads_gradients(loop):
    for seed in range(2):
        loop.backward(seed)
        loop.see_gradients(f"step {seed}")
        norms = [parameter.grad.norm() for parameter in loop.model.parameters()]
        loop.see("norm", torch.stack([torch.as_tensor(_plain(norm)) for norm in norms]).norm())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


# Clipping, by names that were imported before this library was


@habit
def clips_by_early_names(loop):
    clip_grad_norm_, get_total_norm, clip_grads_with_norm_, clip_grad_value_ = early_names()
    for seed in range(2):
        loop.backward(seed)
        parameters = list(loop.model.parameters())
        loop.see("norm", clip_grad_norm_(parameters, 0.5))
        loop.see("norm of a part", get_total_norm([parameter.grad for parameter in loop.parameters("mlp")]))
        loop.see("largest", get_total_norm((parameter.grad for parameter in parameters), float("inf")))
        clip_grads_with_norm_(loop.parameters("mlp"), 0.1, get_total_norm([p.grad for p in loop.parameters("mlp")]))
        clip_grad_value_(parameters, 1e-3)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@habit
def clips_by_late_names(loop):
    for seed in range(2):
        loop.backward(seed)
        parameters = list(loop.model.parameters())
        loop.see("norm", torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
        torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, loop.seen["norm"])
        torch.nn.utils.clip_grad_value_(parameters, 1e-3)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def _plain(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Losses


@habit
def adds_other_terms(loop):
    for seed in range(2):
        loss = loop.loss(seed)
        total = loss + 0.1 * sum(_squares(parameter) for parameter in loop.model.parameters())
        (total / 4).backward()
        loop.losses.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def _squares(parameter):
    return _plain(parameter.pow(2).sum())


@habit
def two_forwards_one_backward(loop):
    for seed in (0, 2):
        ((loop.loss(seed) + 3 * loop.loss(seed + 1)) / 4).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@habit
def two_forwards_two_backwards(loop):
    for seed in (0, 2):
        first, second = loop.loss(seed), loop.loss(seed + 1)
        first.backward()
        second.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@habit
def retains_the_graph(loop):
    loss = loop.loss(0)
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    loop.optimizer.step()


@habit
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


@habit
def accumulates_with_checkpointing(loop):
    loop.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for seed in (0, 2):
        loop.step(seed, seed + 1)
    loop.model.gradient_checkpointing_disable()


@habit
def freezes_between_microbatches(loop):
    loop.backward(0)
    for parameter in loop.parameters("mlp"):
        parameter.requires_grad_(False)
    loop.step(1)
    loop.model.requires_grad_(True)
    loop.step(2)


# Trained inputs


@habit
def trains_inputs(loop):
    whole = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(0))
    for seed in range(2):
        own = own_rows(loop.model, {"x": whole, **batch(seed)})
        inputs = own["x"].clone().requires_grad_()
        loss = loop.model(inputs_embeds=inputs, labels=own["labels"]).loss
        loss.backward()
        loop.losses.append(loss.item())
        expected = own_rows(loop.model, {"x": torch.arange(4)})["x"]
        loop.rows(f"inputs {seed}", inputs.grad, expected)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@habit
def gives_embeddings_of_its_own(loop):
    for seed in range(2):
        own = own_rows(loop.model, batch(seed))
        inputs = loop.model.get_input_embeddings()(own["input_ids"]) * 1.5
        loss = loop.model(inputs_embeds=inputs, labels=own["labels"]).loss
        loss.backward()
        loop.losses.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()


# What data parallelism refuses

PARTIAL = {}


def partial(function):
    PARTIAL[function.__name__] = function
    return function


@partial
def asks_autograd_for_gradients(loop):
    parameters = list(loop.model.parameters())
    for name, gradient in zip(
        dict(loop.model.named_parameters()), torch.autograd.grad(loop.loss(0), parameters), strict=True
    ):
        loop.seen[name] = full(loop.model, name, gradient)
    [gradient] = torch.autograd.grad(loop.loss(1), parameters[3:4])
    loop.seen["of one"] = full(loop.model, list(dict(loop.model.named_parameters()))[3], gradient)


@partial
def hooks_on_gradients(loop):
    seen = []
    hooks = [parameter.register_hook(lambda gradient: gradient * 0.5) for parameter in loop.parameters("proj")]
    hooks += [
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm()))
        for parameter in loop.parameters("norm")
    ]
    try:
        loop.step(0)
        loop.step(1)
    finally:
        for hook in hooks:
            hook.remove()
    loop.see("seen", torch.stack([_plain(norm) for norm in seen]))


@partial
def soft_prompt_outside_of_the_model(loop):
    prompt = torch.zeros(2, 32, requires_grad=True)
    own = own_rows(loop.model, batch(0))
    words = loop.model.get_input_embeddings()(own["input_ids"])
    inputs = torch.cat([prompt.expand(len(words), 2, 32), words], 1)
    labels = torch.nn.functional.pad(own["labels"], (2, 0), value=-100)
    loop.model(inputs_embeds=inputs, labels=labels).loss.backward()
    loop.see("prompt", prompt.grad)


REFUSALS = {
    "asks_autograd_for_gradients": "torch.autograd.grad by parameters",
    "hooks_on_gradients": "A hook on the gradient of",
    "soft_prompt_outside_of_the_model": "Make them parameters of the model",
}


@pytest.fixture(scope="module")
def partial_runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    # Stage 3 does not go on after an error.
    return {name: Runs(path, {name: function}) for name, function in PARTIAL.items()}


@pytest.mark.parametrize("text", SPLIT)
@pytest.mark.parametrize("name", PARTIAL)
def test_equal_where_one_rank_sees_all_of_the_batch(partial_runs, text, name):
    partial_runs[name].compare(text, name)


# In stage 3 torch itself refuses the others: parameters of the loop's are not those in the graph.
@pytest.mark.parametrize(
    ("name", "text"),
    [*((n, text) for n in PARTIAL for text in ("dp2", "tp2+dp2")), ("hooks_on_gradients", "dp2+zero3")],
)
def test_refused_where_ranks_see_parts_of_the_batch(partial_runs, text, name):
    partial_runs[name].refused(text, name, REFUSALS[name])


# Stage 3 has other parameters between forward and backward, and whole ones inside the model's forward only.
NOT_IN_STAGE_THREE = {
    "sets_gradients_to_none_before_backward",
    "assigns_zeros_between_forward_and_backward",
    "gives_embeddings_of_its_own",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [(n, text) for n in HABITS for text in LAYOUTS if not ("zero3" in text and n in NOT_IN_STAGE_THREE)],
)
def test_equal_to_one_process(runs, text, name):
    runs.compare(text, name)


def keep_a_gradient(path):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout("dp2")).train()
    weight = model.model.norm.weight
    standing = []
    for seed in range(3):
        model(**own_rows(model, batch(seed))).loss.backward()
        standing.append(id(weight.grad))
        model.zero_grad()
    assert len(set(standing)) == 1, "one tensor stands for all gradients that nobody keeps"
    model(**own_rows(model, batch(0))).loss.backward()
    kept = weight.grad
    model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"clone\(\)"):
        kept.norm()
    model(**own_rows(model, batch(1))).loss.backward()
    with pytest.raises(UnsupportedError, match=r"clone\(\)"):
        kept.norm()
    return weight.grad.norm().item() > 0


def test_a_gradient_that_was_cleared_is_not_the_next_one(tmp_path):
    save_tiny(tmp_path)
    assert run_ranks(keep_a_gradient, 2, tmp_path) == [True, True]


def norms(path, text=None):
    """Of the whole model, whichever part a rank holds."""
    clip_grad_norm_, get_total_norm, clip_grads_with_norm_, _ = early_names()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=None if text is None else layout(text)).train()
    model(**own_rows(model, batch(0))).loss.backward()
    parameters = list(model.parameters())

    def total(kind=2.0):
        return get_total_norm([parameter.grad for parameter in parameters], kind).item()

    found = [total(), total(float("inf")), clip_grad_norm_(parameters, 0.5).item(), total()]
    clip_grads_with_norm_(parameters, 0.1, get_total_norm([parameter.grad for parameter in parameters]))
    return [*found, total()]


@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_early_names_see_every_stage(tmp_path, text):
    save_tiny(tmp_path)
    expected = norms(tmp_path)
    for found in run_ranks(norms, ranks_of(layout(text)), tmp_path, text):
        assert found == pytest.approx(expected, rel=1e-5)


def compiled(path, text=None):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=None if text is None else layout(text)).train()
    whole, loop = torch.compile(model, backend="eager"), Loop(model)
    for seed in range(2):
        loss = whole(**own_rows(model, batch(seed))).loss
        loss.backward()
        loop.losses.append(loss.item())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop.losses


@pytest.mark.parametrize("text", ["tp2+sp", "dp2", "dp2+zero3"])
def test_a_compiled_model(tmp_path, text):
    save_tiny(tmp_path)
    expected = compiled(tmp_path)
    for found in run_ranks(compiled, 2, tmp_path, text, timeout=300):
        assert found == pytest.approx(expected, rel=1e-5)

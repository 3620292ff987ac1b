"""Gradients as PyTorch has them: what loops do to `.grad` besides the usual, against one process."""

import pytest
import torch

import hf_megatron

from .habits import LAYOUTS, Runs, save_tiny

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


# Stage 3 has other parameters between forward and backward.
NOT_IN_STAGE_THREE = {"sets_gradients_to_none_before_backward", "assigns_zeros_between_forward_and_backward"}


@pytest.mark.parametrize(
    ("name", "text"),
    [(n, text) for n in HABITS for text in LAYOUTS if not ("zero3" in text and n in NOT_IN_STAGE_THREE)],
)
def test_equal_to_one_process(runs, text, name):
    runs.compare(text, name)

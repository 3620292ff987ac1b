"""Training-loop patterns on gradients between `backward` and `step`."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_megatron.core.off_stage import local_named_parameters
from tests.fuzz.loop import Loop
from tests.fuzz.pattern import LoopPattern


def _bind_early() -> Callable[..., Any]:
    """Returns the unpatched torch function, as in a script that imports it before this library."""
    library = importlib.import_module("hf_megatron")
    library.disable()
    try:
        return torch.nn.utils.clip_grad_norm_
    finally:
        library.enable()


early_clip_grad_norm_ = _bind_early()


def _clear_by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = None


def _zero_in_place(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def _clear_model(loop: Loop) -> None:
    loop.model.zero_grad()


def _freeze_after_first(loop: Loop) -> None:
    if loop.steps == 1:
        # Selected by name, which denotes the same parameters on every pipeline stage.
        for name, parameter in loop.model.named_parameters():
            if any(part in name for part in ("mlp", "wi", "dense", "fc", "experts")):
                parameter.requires_grad_(False)


def _thaw_after_second(loop: Loop) -> None:
    if loop.steps == 2:
        for parameter in loop.model.parameters():
            parameter.requires_grad_(True)


def _freeze_then_thaw(loop: Loop) -> None:
    _freeze_after_first(loop)
    _thaw_after_second(loop)


def _freeze_from_start(loop: Loop) -> None:
    for name, parameter in loop.model.named_parameters():
        if parameter.dim() < 2 or "embed" in name:
            parameter.requires_grad_(False)


def _freeze_first_half(loop: Loop) -> None:
    parameters = list(loop.model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)


def _scale_by_position(loop: Loop) -> None:
    for place, parameter in enumerate(loop.model.parameters()):
        if parameter.grad is not None:
            parameter.grad.mul_((place % 5) / 4)


def _clip_with_early_import(loop: Loop) -> None:
    loop.log("norm", early_clip_grad_norm_(loop.model.parameters(), 0.5 * loop.case["norm"]))


def _clip_grad_norm(loop: Loop) -> None:
    loop.log("norm", torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5 * loop.case["norm"]))


def _clip_infinity_norm(loop: Loop) -> None:
    limit = 0.1 * loop.case["norm"]
    loop.log("norm", torch.nn.utils.clip_grad_norm_(loop.model.parameters(), limit, norm_type=float("inf")))


def _clip_with_accelerate(loop: Loop) -> None:
    loop.log("norm", loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5 * loop.case["norm"]))


def _clip_vectors(loop: Loop) -> None:
    vectors = [parameter for parameter in loop.model.parameters() if parameter.dim() < 2]
    loop.log("norm", torch.nn.utils.clip_grad_norm_(vectors, 0.01 * loop.case["norm"]))


def _clip_grad_value(loop: Loop) -> None:
    torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.01 * loop.case["norm"])


def _log_total_norm(loop: Loop) -> None:
    gradients = [parameter.grad for parameter in loop.model.parameters() if parameter.grad is not None]
    loop.log("total norm", torch.nn.utils.get_total_norm(gradients))


def _log_norm_by_hand(loop: Loop) -> None:
    norms = [parameter.grad.norm().item() for parameter in loop.model.parameters() if parameter.grad is not None]
    loop.log("norm by hand", sum(norm**2 for norm in norms) ** 0.5)


def _scale_by_hand(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _list_token_gradients(loop: Loop) -> list[tuple[Tensor, int]]:
    """Returns gradients `[vocabulary, hidden]` and the number of rows that belong to old tokens."""
    gradients = [parameter.grad for parameter in loop.vocabulary() if parameter.grad is not None]
    return [(gradient, gradient.shape[0] * 3 // 4) for gradient in gradients]


def _zero_rows(loop: Loop) -> None:
    for gradient, old in _list_token_gradients(loop):
        gradient[:old].zero_()


def _assign_rows(loop: Loop) -> None:
    for gradient, old in _list_token_gradients(loop):
        gradient[:old] = 0


def _mask_rows(loop: Loop) -> None:
    for gradient, old in _list_token_gradients(loop):
        mask = torch.ones(gradient.shape[0], 1, dtype=gradient.dtype)
        mask[:old] = 0
        gradient.mul_(mask)


def _call_autograd_grad(loop: Loop, loss: Tensor) -> None:
    parameters = loop.parameters()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _register_halving_hooks(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def _register_counting_hooks(loop: Loop) -> None:
    loop.kept["seen"] = 0

    def look(parameter: nn.Parameter) -> None:
        loop.kept["seen"] += parameter.grad is not None

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)


def _log_hook_calls(loop: Loop) -> None:
    # Hooks on off-stage weights run on other stages: only whether all local hooks were called is equal on all ranks.
    local = [parameter for _, parameter in local_named_parameters(loop.model) if parameter.requires_grad]
    loop.log("hooks that saw a gradient", loop.kept["seen"] >= len(local))


def _log_norm_gradients(loop: Loop) -> None:
    norms = [module for module in loop.model.modules() if type(module).__name__.endswith("Norm")]
    reporting = [norm for norm in norms if float(norm.weight.grad.abs().sum()) > 0]
    loop.log("norms that report a gradient", len(reporting) == len(norms) > 0)


def _run_backward_twice(loop: Loop, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _disable_no_sync(loop: Loop) -> None:
    loop.not_the_last = lambda waits: torch.enable_grad()  # type: ignore[method-assign]


_TWO = {"accumulation": 2}

GRADIENT_PATTERNS = (
    LoopPattern("plain", "loss, backward, step, `optimizer.zero_grad()`"),
    LoopPattern("model cleared", "`model.zero_grad()`", clear=_clear_model),
    LoopPattern("cleared by hand", "`p.grad = None` for every parameter", clear=_clear_by_hand),
    LoopPattern("zeroed in place", "`optimizer.zero_grad(set_to_none=False)`", clear=_zero_in_place),
    LoopPattern(
        "zeroed then frozen",
        "`zero_grad(set_to_none=False)`, then freezing a parameter that has stepped",
        clear=_zero_in_place,
        after_step=_freeze_after_first,
        acts=1,
    ),
    LoopPattern("frozen", "training without norms, biases and embeddings", made=_freeze_from_start),
    LoopPattern("frozen by place", "freezing the first half of `list(model.parameters())`", made=_freeze_first_half),
    LoopPattern("scaled by place", "a factor for each place in `model.parameters()`", before_step=_scale_by_position),
    LoopPattern("frozen later", "freezing after the first step", after_step=_freeze_after_first, acts=1),
    LoopPattern(
        "frozen and thawed",
        "freezing after the first step, thawing after the second",
        after_step=_freeze_then_thaw,
        acts=1,
    ),
    LoopPattern(
        "clipped bound early", "`clip_grad_norm_` imported before this library", before_step=_clip_with_early_import
    ),
    LoopPattern("clipped", "`torch.nn.utils.clip_grad_norm_`", before_step=_clip_grad_norm),
    LoopPattern("clipped by infinity", "`clip_grad_norm_(norm_type=inf)`", before_step=_clip_infinity_norm),
    LoopPattern("clipped in part", "`clip_grad_norm_` of some parameters", before_step=_clip_vectors),
    LoopPattern(
        "clipped by Accelerate",
        "`accelerator.clip_grad_norm_`",
        before_step=_clip_with_accelerate,
        loop="accelerate",
    ),
    LoopPattern("value clipped", "`clip_grad_value_`", before_step=_clip_grad_value),
    LoopPattern("total norm", "`get_total_norm` of all gradients, logged", before_step=_log_total_norm),
    LoopPattern(
        "norm by hand",
        "`p.grad.norm().item() ** 2` of all summed",
        before_step=_log_norm_by_hand,
    ),
    LoopPattern("gradients scaled", "`p.grad.mul_(0.5)`", before_step=_scale_by_hand),
    LoopPattern("gradient rows zeroed", "`p.grad[:50].zero_()` of embedding and head", before_step=_zero_rows),
    LoopPattern("gradient rows assigned", "`p.grad[:50] = 0` of embedding and head", before_step=_assign_rows),
    LoopPattern("gradient masked", "`p.grad.mul_(mask)`, the mask a plain tensor", before_step=_mask_rows),
    LoopPattern("autograd.grad", "`torch.autograd.grad(loss, parameters)`", backward=_call_autograd_grad),
    LoopPattern("gradient hooks", "`p.register_hook` that scales", made=_register_halving_hooks),
    LoopPattern(
        "accumulation hooks",
        "`p.register_post_accumulate_grad_hook`",
        made=_register_counting_hooks,
        before_step=_log_hook_calls,
    ),
    LoopPattern("gradients of modules", "`module.weight.grad` of norms read in a log", before_step=_log_norm_gradients),
    LoopPattern("backward twice", "`retain_graph=True` and a second backward", backward=_run_backward_twice),
    LoopPattern("accumulated", "two equal microbatches, the first inside `no_sync`", batch=_TWO),
    LoopPattern("accumulated unevenly", "microbatches of unequal rows", batch={**_TWO, "uneven": True}),
    LoopPattern("accumulated synchronized", "two backwards without `no_sync`", made=_disable_no_sync, batch=_TWO),
    LoopPattern("accumulated by Accelerate", "`accelerator.accumulate`", loop="accelerate", batch=_TWO),
)

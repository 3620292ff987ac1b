"""Where stock code asks autograd for gradients: backward, and hooks on what is differentiated, also after a cast.

torch imports the targets itself, so nothing of it may be imported before a wrapper is called.
"""

from collections.abc import Callable
from typing import Any

from ...core.runtime import RUNTIME


def backward(original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses trained tensors of any shape that get gradients which nobody would reduce, before they do.

    Of the inputs that a backward is asked for this rank has its own; without any it takes part for the others.
    """
    if RUNTIME.models:
        from ...core.off_stage import gradients_of, is_off_stage, own_terms
        from ...data_parallel.untracked_leaves import check_backward

        tensors = own_terms(tensors)
        check_backward(tensors)
        inputs = kwargs.get("inputs")
        inputs = list(inputs.values()) if isinstance(inputs, dict) else inputs
        if isinstance(inputs, list | tuple) and any(map(is_off_stage, inputs)):
            kwargs["inputs"] = [tensor for tensor in inputs if not is_off_stage(tensor)]
            if not kwargs["inputs"]:
                names = ("grad_tensors", "retain_graph", "create_graph")
                given = dict(zip(names, args, strict=False)) | {n: kwargs[n] for n in names if n in kwargs}
                gradients_of(tensors, inputs, given.pop("grad_tensors", None), **given)
                return
    original(tensors, *args, **kwargs)


def run_backward(
    original: Callable, outputs: Any, seeds: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs autograd's engine, which raises where a split weight that it needs was edited in place.

    Refuses the gradients of inputs, of any shape, that hooks of split modules were given.
    """
    if RUNTIME.models:
        from ...data_parallel.engine import all_engines
        from ...tensor_parallel.user_hooks.hooks import reject_hook_inputs

        reject_hook_inputs(inputs)
        for engine in all_engines():
            engine.sync_user_edits()
    return original(outputs, seeds, keep, create, inputs, *args, **kwargs)


def register_hook(original: Callable, self: Any, hook: Callable) -> Any:
    """Refuses hooks on the gradients of activations, of any shape, that would see them with a factor."""
    if RUNTIME.models and self.grad_fn is not None:
        from ...data_parallel.untracked_leaves import reject_activation_hook

        reject_activation_hook(self, hook)
    return original(self, hook)


_RETAIN = "retain_grad"


class RetainedGradients:
    """Puts a check in front of `Tensor.retain_grad`, which `Tensor` inherits, until `remove()`."""

    def __init__(self) -> None:
        import torch

        self._owner = torch.Tensor
        stock = torch.Tensor.retain_grad

        def retain_grad(tensor: Any) -> None:
            if RUNTIME.models and tensor.grad_fn is not None:
                from ...data_parallel.untracked_leaves import reject_gradient

                reject_gradient(tensor, "retain_grad()")
            stock(tensor)

        setattr(self._owner, _RETAIN, retain_grad)

    def remove(self) -> None:
        delattr(self._owner, _RETAIN)


def watch_retained_gradients() -> RetainedGradients:
    """Registers the check, and returns what takes it back."""
    return RetainedGradients()


def swap_tensors(original: Callable, t1: Any, t2: Any) -> None:
    """Swaps two tensors, as casts of split weights do, and has autograd call the hooks of both again."""
    original(t1, t2)
    if RUNTIME.models:
        from ...compat.torch_autograd import restore_hooks

        restore_hooks(t1)
        restore_hooks(t2)

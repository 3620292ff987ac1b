"""Patches of autograd for parallelized models: backward, gradient hooks, `retain_grad` and `swap_tensors`.

torch itself imports the targets, so nothing of torch may be imported before a wrapper is called.
"""

from collections.abc import Callable
from typing import Any

from ...core.runtime import RUNTIME


def backward(original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Runs backward after rejecting trained tensors, of any shape, whose gradients would never be reduced.

    Of the requested `inputs`, this rank differentiates its own. If all of them are off-stage, it still takes part in
    the backward, because other stages wait for its sends and receives.
    """
    checks: list[Any] = []
    if RUNTIME.models:
        from ...core.off_stage import compute_gradients, is_off_stage, own_terms
        from ...data_parallel.untracked_leaves import check_backward

        tensors = own_terms(tensors)
        inputs = kwargs.get("inputs")
        checks = check_backward(tensors, is_partial=inputs is not None or len(args) > 4)
        inputs = list(inputs.values()) if isinstance(inputs, dict) else inputs
        if isinstance(inputs, list | tuple) and any(map(is_off_stage, inputs)):
            kwargs["inputs"] = [tensor for tensor in inputs if not is_off_stage(tensor)]
            if not kwargs["inputs"]:
                names = ("grad_tensors", "retain_graph", "create_graph")
                options = dict(zip(names, args, strict=False)) | {n: kwargs[n] for n in names if n in kwargs}
                compute_gradients(tensors, inputs, options.pop("grad_tensors", None), **options)
                return
    try:
        original(tensors, *args, **kwargs)
    finally:
        for check in checks:
            check.remove()


def run_backward(
    original: Callable, outputs: Any, seeds: Any, keep: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs autograd's engine, after recording in-place edits of sharded weights, so that it raises for outdated values.

    Rejects gradients with respect to inputs, of any shape, that user hooks of sharded modules have received as copies.
    """
    RUNTIME.awaits_backward = False
    if RUNTIME.models:
        from ...data_parallel.engine import all_engines
        from ...tensor_parallel.user_hooks.hooks import reject_hook_inputs

        reject_hook_inputs(inputs)
        engines = all_engines()
        for engine in engines:
            engine.sync_user_edits()
        run = _run_in_stages if any(engine.state.cut is not None for engine in engines) else _run
        return run(original, outputs, seeds, keep, create, inputs, *args, **kwargs)
    return original(outputs, seeds, keep, create, inputs, *args, **kwargs)


def _run(
    original: Callable,
    outputs: Any,
    seeds: Any,
    keep: Any,
    create: Any,
    inputs: Any,
    allow_unreachable: bool = False,
    accumulate_grad: bool = True,
) -> Any:
    """Runs autograd's engine, which knows sharded parameters by the plain leaves that forwards read."""
    from ...compat.graph_leaves import LeafInputs

    requested = LeafInputs(inputs)
    if not requested.positions:
        return original(outputs, seeds, keep, create, inputs, allow_unreachable, accumulate_grad)
    gradients = original(outputs, seeds, keep, create, requested.inputs, True, accumulate_grad)
    return gradients if accumulate_grad else requested.merge(gradients, allow_unused=allow_unreachable)


def _run_in_stages(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs autograd's engine in a job with a pipelined model, and explains its error for a freed graph."""
    from ...pipeline_parallel.taken_activations import explain_freed_graph

    try:
        return _run(original, *args, **kwargs)
    except RuntimeError as error:
        explain_freed_graph(error)
        raise


def register_hook(original: Callable, self: Any, hook: Callable) -> Any:
    """Registers a gradient hook; rejects activations of data-parallel models, whose gradients carry a dp factor."""
    if RUNTIME.models and self.grad_fn is not None:
        from ...data_parallel.untracked_leaves import reject_activation_hook

        reject_activation_hook(self, hook)
    return original(self, hook)


_RETAIN = "retain_grad"


class RetainedGradients:
    """Check in front of `Tensor.retain_grad`, until `remove()`."""

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
    """Installs the check and returns its removal handle."""
    return RetainedGradients()


def swap_tensors(original: Callable, t1: Any, t2: Any) -> None:
    """Swaps two tensors, as casts of sharded weights do, and restores their autograd hooks."""
    if not RUNTIME.models:
        original(t1, t2)
        return
    from ...compat.graph_leaves import released_leaf
    from ...compat.torch_autograd import restore_hooks

    with released_leaf(t1), released_leaf(t2):
        original(t1, t2)
    restore_hooks(t1)
    restore_hooks(t2)

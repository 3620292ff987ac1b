"""Patches of gradient and optimizer calls: Accelerate's preparation, loss scalers and torch's clipping functions.

torch itself imports some of the targets, so nothing of torch may be imported before a wrapper is called.
"""

from collections.abc import Callable
from typing import Any

from ...core.runtime import RUNTIME


def prepare_optimizer(original: Callable, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Converts a parallelized model's optimizer to a distributed one before Accelerate wraps it."""
    from accelerate.optimizer import AcceleratedOptimizer

    from ...data_parallel.distributed_optimizer import prepare_optimizer as take_over

    if not isinstance(optimizer, AcceleratedOptimizer):
        optimizer = take_over(optimizer)
    return original(self, optimizer, *args, **kwargs)


def optimizer_step(original: Callable, self: Any, closure: Any = None) -> Any:
    """Steps the optimizer, and records whether all ranks skipped the step, which schedulers read from the wrapper."""
    from ...data_parallel.distributed_optimizer import list_sharded

    result = original(self, closure)
    states = list_sharded(self.optimizer)
    if states and self.scaler is None and self.gradient_state.sync_gradients:
        self._is_overflow = any(state.step_was_skipped for state in states)
    return result


def unscale_grads(
    original: Callable, self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
) -> Any:
    """Unscales the reduced gradients, `inv_scale` and `found_inf` `()`; `found_inf` is identical on all ranks."""
    from ...data_parallel.distributed_optimizer import list_sharded
    from ...data_parallel.grad_scaler import unscale

    states = list_sharded(optimizer)
    if not states:
        return original(self, optimizer, inv_scale, found_inf, allow_fp16)
    return unscale(states, inv_scale, found_inf)


def clip_grad_norm_(
    original: Callable,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Clips the gradients of parameters, of any shape, by the norm over the full model."""
    from torch import Tensor

    from ...data_parallel.grad_norm import clip_grad_norm
    from ...data_parallel.norm_checks import joins

    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if joins(parameters):
        return clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite)
    return original(parameters, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)


def get_total_norm(
    original: Callable,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the gradient norm of the full model, a scalar, if `tensors`, of any shape, are its gradients."""
    from torch import Tensor

    from ...data_parallel.grad_norm import check_norm, gradient_norm
    from ...data_parallel.norm_checks import joins

    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    parameters = _find_parameters(tensors) if tensors or not joins(tensors) else []
    if parameters is None:
        return original(tensors, norm_type, error_if_nonfinite, *args, **kwargs)
    return check_norm(gradient_norm(parameters, norm_type), error_if_nonfinite)


def clip_grads_with_norm_(
    original: Callable, parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
) -> None:
    """Scales the gradients of parameters, of any shape, by a given total norm, a scalar."""
    from torch import Tensor

    from ...data_parallel.engine import get_engine
    from ...data_parallel.grad_norm import clip_with_norm

    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(get_engine(parameter) is not None for parameter in parameters):
        clip_with_norm(parameters, max_norm, total_norm)
    else:
        original(parameters, max_norm, total_norm, *args, **kwargs)


def _find_parameters(gradients: list[Any]) -> list[Any] | None:
    """Returns the parameters that these gradients belong to; `None` if one is not a parallelized model's gradient."""
    from ...compat.torch_dtensor import local_tensor
    from ...core.off_stage import OffStageTensor, local_named_parameters
    from ...data_parallel.sharded_grad import ShardedGrad

    models = RUNTIME.models
    if not models or not gradients:
        return None
    # Identify each gradient by its local storage and its global shape.
    known = {
        (local_tensor(parameter.grad).data_ptr(), parameter.grad.shape): parameter
        for model in models
        for _, parameter in local_named_parameters(model)
        if parameter.grad is not None and not isinstance(parameter.grad, ShardedGrad)
    }

    def find_parameter(gradient: Any) -> Any:
        if isinstance(gradient, OffStageTensor):
            return gradient.weight
        if isinstance(gradient, ShardedGrad):
            return gradient.parameter
        return known.get((local_tensor(gradient).data_ptr(), gradient.shape))

    parameters = list(map(find_parameter, gradients))
    return None if any(parameter is None for parameter in parameters) else parameters


def watch_unprepared_steps() -> Any:
    """Registers a hook before steps of unprepared optimizers; returns its removal handle."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ...data_parallel.unprepared_steps import before_unprepared_step

    return register_optimizer_step_pre_hook(before_unprepared_step)


def end_unprepared_steps() -> Any:
    """Registers a hook after steps of unprepared optimizers; returns its removal handle."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ...data_parallel.unprepared_steps import after_unprepared_step

    return register_optimizer_step_post_hook(after_unprepared_step)

"""Where stock code touches gradients and optimizers: Accelerate's preparation, loss scalers, torch's own clipping.

Some of the targets are imported by torch itself, so nothing of it may be imported before a wrapper is called.
"""

from collections.abc import Callable
from typing import Any

from ...core.runtime import RUNTIME


def prepare_optimizer(original: Callable, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the optimizer of a laid out model step on what this rank reduces, before Accelerate wraps it."""
    from accelerate.optimizer import AcceleratedOptimizer

    from ...data_parallel.distributed_optimizer import prepare_optimizer as take_over

    if not isinstance(optimizer, AcceleratedOptimizer):
        optimizer = take_over(optimizer)
    return original(self, optimizer, *args, **kwargs)


def optimizer_step(original: Callable, self: Any, closure: Any = None) -> Any:
    """Steps, and tells schedulers, which ask the wrapper, whether all ranks skipped the step."""
    from ...data_parallel.distributed_optimizer import sharded

    result = original(self, closure)
    state = sharded(self.optimizer)
    if state is not None and self.scaler is None and self.gradient_state.sync_gradients:
        self._is_overflow = state.step_was_skipped
    return result


def unscale_grads(
    original: Callable, self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
) -> Any:
    """Unscales the reduced gradients, `inv_scale` and `found_inf` `()`; all ranks find the same infinities."""
    from ...data_parallel.distributed_optimizer import sharded
    from ...data_parallel.grad_scaler import unscale

    state = sharded(optimizer)
    if state is None:
        return original(self, optimizer, inv_scale, found_inf, allow_fp16)
    return unscale(state, inv_scale, found_inf)


def clip_grad_norm_(
    original: Callable,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Clips the gradients of parameters, of any shape, by the norm of the whole model's."""
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
    """Returns the norm of the whole model's gradients, a scalar, where tensors of any shape are its gradients."""
    from torch import Tensor

    from ...data_parallel.grad_norm import check_norm, gradient_norm
    from ...data_parallel.norm_checks import joins

    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    parameters = _parameters_of(tensors) if tensors or not joins(tensors) else []
    if parameters is None:
        return original(tensors, norm_type, error_if_nonfinite, *args, **kwargs)
    return check_norm(gradient_norm(parameters, norm_type), error_if_nonfinite)


def clip_grads_with_norm_(
    original: Callable, parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
) -> None:
    """Scales the gradients of parameters, of any shape, as their norm, a scalar, says."""
    from torch import Tensor

    from ...data_parallel.engine import engine_of
    from ...data_parallel.grad_norm import clip_with_norm

    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(engine_of(parameter) is not None for parameter in parameters):
        clip_with_norm(parameters, max_norm, total_norm)
    else:
        original(parameters, max_norm, total_norm, *args, **kwargs)


def _parameters_of(gradients: list[Any]) -> list[Any] | None:
    """Finds the parameters of laid out models that these tensors are the gradients of; `None` if some are none."""
    from ...compat.torch_dtensor import local_tensor
    from ...core.off_stage import OffStageTensor, local_named_parameters
    from ...data_parallel.sharded_grad import ShardedGrad

    models = RUNTIME.models
    if not models or not gradients:
        return None
    known = {
        (local_tensor(parameter.grad).data_ptr(), parameter.grad.shape): parameter
        for model in models
        for _, parameter in local_named_parameters(model)
        if parameter.grad is not None and not isinstance(parameter.grad, ShardedGrad)
    }

    def parameter_of(gradient: Any) -> Any:
        if isinstance(gradient, OffStageTensor):
            return gradient.weight
        if isinstance(gradient, ShardedGrad):
            return gradient.parameter
        return known.get((local_tensor(gradient).data_ptr(), gradient.shape))

    found = list(map(parameter_of, gradients))
    return None if any(parameter is None for parameter in found) else found


def watch_unprepared_steps() -> Any:
    """Registers what comes before steps of unprepared optimizers; returns the handle to remove it."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from ...data_parallel.unprepared_steps import before_unprepared_step

    return register_optimizer_step_pre_hook(before_unprepared_step)


def end_unprepared_steps() -> Any:
    """Registers what comes after them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ...data_parallel.unprepared_steps import after_unprepared_step

    return register_optimizer_step_post_hook(after_unprepared_step)

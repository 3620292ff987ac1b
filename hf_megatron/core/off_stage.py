"""Off-stage tensors: parameters of other pipeline stages, listed with names, shapes and dtypes but without values.

A single-process model lists all parameters, and training code iterates over them to count, freeze, group, copy,
average or load them, by name or by index. Parameters of other stages take part like tensors on the meta device;
operations that need values raise an error with their location.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..compat.torch_autograd import draws_numbers, writes_to
from ..errors import UnsupportedError
from .collected_values import VALUE_PRESERVING, collected_value, drop_value, pass_on_value
from .off_stage_ops import (
    FACTORS,
    SUMS,
    OffStage,
    add_terms,
    call,
    each,
    flat,
    has_terms,
    is_term,
    off_stage_values_error,
    scale_terms,
    several_stages,
    to_memory,
    to_meta,
)

# Operations that neither read nor combine values.
_PASSING = {"__get__", "__set__", "detach", "clone", "dim", "size", "requires_grad_", "register_hook"}


class Owner(Protocol):
    """Engine of the model that off-stage weights belong to.

    Attributes:
        pipeline_backwards (`int`): number of backwards that have added to the model's gradients.
    """

    pipeline_backwards: int

    def any_trained_parameter(self) -> nn.Parameter | None:
        """Returns one of this rank's trained parameters, of any shape."""


class OffStageTensor(OffStage):
    """Tensor whose shape and dtype, but not values, are known on this rank; constructed as `OffStage`.

    Copies, casts and arithmetic return off-stage tensors, and writes to one have no effect. In sums that are
    differentiated, every rank holds its own terms. Reading values, pickling and saving raise `UnsupportedError`.

    Attributes:
        owner (`Owner`, *optional*): for a model's parameter: the engine of the model.
        weight (`OffStageTensor`, *optional*): for a gradient: its parameter.
    """

    owner: Owner | None = None
    weight: "OffStageTensor | None" = None
    # Value of `owner.pipeline_backwards` when the gradient was last cleared.
    _cleared: int = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        result = cls._run(func, name, args, kwargs or {})
        return pass_on_value(args[0], result, name) if name in VALUE_PRESERVING else result

    @classmethod
    def _run(cls, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if name in _PASSING:
                result = func(*args, **kwargs)
                if name == "detach":
                    result.weight = args[0].weight
                return result
            if name == "backward" and isinstance(args[0], OffStageTensor):
                return None if args[0].terms is None else args[0].terms.backward(*args[1:], **kwargs)
            if func is torch.autograd.grad:
                return compute_gradients(*args, **kwargs)
            if name in SUMS and all(is_term(value) for value in args):
                return add_terms(func, args, kwargs)
            if name in FACTORS and isinstance(args[0], OffStageTensor) and args[0].terms is not None:
                return scale_terms(func, args, kwargs)
            if "foreach" in name:
                return each(func, args, kwargs)
            if any(map(has_terms, flat((args, kwargs)))):
                raise several_stages(name)
            return call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        off_stage_args = [value for value in flat((args, kwargs)) if isinstance(value, OffStageTensor)]
        off_stage = next(
            (value for value in off_stage_args if isinstance(value, OffStageActivation)), off_stage_args[0]
        )
        written = writes_to(func, args, kwargs)
        if any(not isinstance(tensor, OffStageTensor) for tensor in written):
            off_stage._reject()
        device = kwargs.get("device") or off_stage.device
        if draws_numbers(func):
            # A single process would draw these random numbers, so draw them here too to keep the RNG states in sync.
            result = func(*tree_map(to_memory, args), **tree_map(to_memory, kwargs))
        else:
            kwargs |= {"device": torch.device("meta")} if "device" in kwargs else {}
            try:
                result = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
            except (RuntimeError, NotImplementedError) as error:
                raise off_stage_values_error(off_stage.place) from error
        if written:
            for tensor in written:
                drop_value(tensor)
            return args[0]
        return off_stage.others(result, device)

    @property
    def grad(self) -> "OffStageTensor | None":  # type: ignore[override]
        """Placeholder for the gradient, of the tensor's shape, from a backward until the gradient is cleared."""
        if self.owner is None:
            return super().grad  # type: ignore[return-value]
        return self.gradient() if self.requires_grad and self.owner.pipeline_backwards > self._cleared else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Records whether the parameter has a gradient, of any shape; the gradient itself is on another rank."""
        if self.owner is not None:
            self._cleared = self.owner.pipeline_backwards if value is None else -1
            return
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.grad.__set__(self, value)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        """Clears the gradient."""
        self.grad = None

    def gradient(self) -> "OffStageTensor":
        """Returns a placeholder for the gradient, of the tensor's shape."""
        gradient = OffStageTensor(self.meta, self.device, self.place)
        gradient.weight = self
        return gradient

    @property
    def data(self) -> "OffStageTensor":  # type: ignore[override]
        """Off-stage tensor of the same shape, detached from the graph."""
        return OffStageTensor(self.meta, self.device, self.place)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Adopts the dtype and device of a tensor of the same shape."""
        if value.shape != self.shape:
            self._reject()
        self.meta, self._present = self.meta.to(value.dtype), (value.dtype, value.device)

    def _reject(self, *args: Any, **kwargs: Any) -> Any:
        raise off_stage_values_error(self.place)

    # Methods that read memory without dispatching an operator.
    numpy = tolist = data_ptr = untyped_storage = storage = __array__ = _reject  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        full = collected_value(self)
        return self._reject() if full is None else full.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffStageTensor":
        other = OffStageTensor(self.meta, self.device, self.place)
        if self.owner is not None:
            as_parameter(other, self.owner, self.requires_grad)
        return memo.setdefault(id(self), other)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OffStageTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.place})"


class OffStageActivation(OffStageTensor):
    """Output of an off-stage module, for use as an input of the following call of the model.

    Results that combine it with tensors of this rank, such as trained prompts, are off-stage activations too.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_parameter(tensor: OffStageTensor, owner: Owner, requires_grad: bool) -> OffStageTensor:
    """Turns an off-stage tensor of any shape into a model's parameter."""
    tensor._is_param = True  # type: ignore[attr-defined]
    tensor.owner, tensor._cleared = owner, owner.pipeline_backwards
    tensor.requires_grad_(requires_grad)
    return tensor


class OffStageModule:
    """Marks a proxy for a module of another rank, which holds at most some submodules of the original."""


def computes_here(module: nn.Module) -> bool:
    """Returns whether a module has parameters and runs on this rank, rather than being an off-stage proxy."""
    return not isinstance(module, OffStageModule) and next(module.parameters(), None) is not None


def is_off_stage(tensor: Any) -> bool:
    """Returns whether the values of a tensor of any shape are on another rank."""
    return isinstance(tensor, OffStageTensor)


def zeros_for_off_stage(tensor: Tensor) -> Tensor:
    """Returns zeros in place of an off-stage tensor of any shape, and other tensors unchanged."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if is_off_stage(tensor) else tensor


def local_named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields names and parameters, of any shape, whose values are on this rank; arguments as `named_parameters`."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if not is_off_stage(parameter))


def own_state_dict(model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    """Returns the entries of a state dict, of any shapes, whose values are on this rank."""
    state = model.state_dict(**kwargs)
    return {name: tensor for name, tensor in state.items() if not is_off_stage(tensor)}


def compute_gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Runs `torch.autograd.grad` for inputs of any shape, some of them off-stage; gradients of these are placeholders.

    The backward runs on every stage, so a stage without any of the inputs differentiates one of its own parameters.
    Raises `UnsupportedError` on a rank that trains no parameter of the inputs' model.
    """
    outputs, inputs = own_terms(outputs), (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    local_inputs = [tensor for tensor in inputs if not is_off_stage(tensor)]
    if not local_inputs:
        local_parameter = inputs[0].owner.any_trained_parameter() if inputs and inputs[0].owner is not None else None
        if local_parameter is None:
            raise UnsupportedError(
                "torch.autograd.grad or backward(inputs=...) got only off-stage weights, and this pipeline stage has "
                "no trained parameter. Call loss.backward()."
            )
        local_inputs, kwargs = [local_parameter], {**kwargs, "allow_unused": True}
    grads = iter(torch.autograd.grad(outputs, local_inputs, *args, **kwargs))
    return tuple(tensor.gradient() if isinstance(tensor, OffStageTensor) else next(grads) for tensor in inputs)


def own_terms(outputs: Any) -> Any:
    """Returns this rank's terms of differentiated sums: scalars `[]` or graph edges, single or in a list."""
    if isinstance(outputs, list | tuple):
        return type(outputs)(map(own_terms, outputs))
    return outputs.terms if isinstance(outputs, OffStageTensor) and outputs.terms is not None else outputs

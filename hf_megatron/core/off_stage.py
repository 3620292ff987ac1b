"""Weights of other pipeline stages as a model lists them: their names, shapes and dtypes without values.

One process's model lists every weight, and loops that count, freeze, group, copy, average or load weights go through
all of them, by name or by place. What lies on another rank takes part as a tensor on the meta device would; whoever
needs values is told where they are.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..compat.torch_autograd import draws_numbers, writes_to
from ..errors import UnsupportedError
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

# What neither reads nor combines values.
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
    """A tensor of which this rank knows shape and dtype only, made as `OffStage`.

    Copies, casts and arithmetic make others of its kind, and what writes to one does nothing. In sums that are
    differentiated every rank has its own terms. Reading values, pickling and saving raise `UnsupportedError`.

    Attributes:
        owner (`Owner`, *optional*): of a model's weight: who knows the model's others.
        weight (`OffStageTensor`, *optional*): of a gradient: what it is of.
    """

    owner: Owner | None = None
    weight: "OffStageTensor | None" = None
    # Backwards before the gradient was cleared.
    _cleared: int = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _PASSING:
                result = func(*args, **kwargs)
                if name == "detach":
                    result.weight = args[0].weight
                return result
            if name == "backward" and isinstance(args[0], OffStageTensor):
                return None if args[0].terms is None else args[0].terms.backward(*args[1:], **kwargs)
            if func is torch.autograd.grad:
                return gradients_of(*args, **kwargs)
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
        found = [value for value in flat((args, kwargs)) if isinstance(value, OffStageTensor)]
        off_stage = next((value for value in found if isinstance(value, OffStageActivation)), found[0])
        written = writes_to(func, args, kwargs)
        if any(not isinstance(tensor, OffStageTensor) for tensor in written):
            off_stage._reject()
        device = kwargs.get("device") or off_stage.device
        if draws_numbers(func):
            # One process draws these numbers; the next ones are its too.
            result = func(*tree_map(to_memory, args), **tree_map(to_memory, kwargs))
        else:
            kwargs |= {"device": torch.device("meta")} if "device" in kwargs else {}
            try:
                result = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
            except (RuntimeError, NotImplementedError) as error:
                raise off_stage_values_error(off_stage.place) from error
        if written:
            return args[0]
        return off_stage.others(result, device)

    @property
    def grad(self) -> "OffStageTensor | None":  # type: ignore[override]
        """The gradient, of the tensor's shape, which another rank has from a backward until it is cleared."""
        if self.owner is None:
            return super().grad  # type: ignore[return-value]
        return self.gradient() if self.requires_grad and self.owner.pipeline_backwards > self._cleared else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Notes whether a weight has one, of any shape, and leaves that to the rank that has the weight."""
        if self.owner is not None:
            self._cleared = self.owner.pipeline_backwards if value is None else -1
            return
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.grad.__set__(self, value)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        """Clears it."""
        self.grad = None

    def gradient(self) -> "OffStageTensor":
        """Returns what stands for the gradient, of the tensor's shape."""
        gradient = OffStageTensor(self.meta, self.device, self.place)
        gradient.weight = self
        return gradient

    @property
    def data(self) -> "OffStageTensor":  # type: ignore[override]
        """Another of its shape, without a graph behind it."""
        return OffStageTensor(self.meta, self.device, self.place)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Takes over the dtype and device of a tensor of the same shape."""
        if value.shape != self.shape:
            self._reject()
        self.meta, self._present = self.meta.to(value.dtype), (value.dtype, value.device)

    def _reject(self, *args: Any, **kwargs: Any) -> Any:
        raise off_stage_values_error(self.place)

    # What reads memory without an operator of its own.
    numpy = tolist = data_ptr = untyped_storage = storage = __array__ = __reduce_ex__ = _reject  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffStageTensor":
        other = OffStageTensor(self.meta, self.device, self.place)
        if self.owner is not None:
            as_parameter(other, self.owner, self.requires_grad)
        return memo.setdefault(id(self), other)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"OffStageTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.place})"


class OffStageActivation(OffStageTensor):
    """What a module of another stage makes of inputs, for the call of the model that follows.

    Whatever is made of it with tensors of this rank, prompts that are trained among them, is one of its kind.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_parameter(tensor: OffStageTensor, owner: Owner, requires_grad: bool) -> OffStageTensor:
    """Makes a model's parameter of an absent tensor of any shape."""
    tensor._is_param = True  # type: ignore[attr-defined]
    tensor.owner, tensor._cleared = owner, owner.pipeline_backwards
    tensor.requires_grad_(requires_grad)
    return tensor


class OffStageModule:
    """Marks a module that stands where another rank's is, with parts of that at most."""


def computes_here(module: nn.Module) -> bool:
    """Tells whether a module with parameters is this rank's own, and nothing that stands for another's."""
    return not isinstance(module, OffStageModule) and next(module.parameters(), None) is not None


def is_off_stage(tensor: Any) -> bool:
    """Tells whether the values of a tensor of any shape are on another rank."""
    return isinstance(tensor, OffStageTensor)


def zeros_for_off_stage(tensor: Tensor) -> Tensor:
    """Returns zeros for what was made of weights of another rank, of any shape, and every other tensor as it is."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if is_off_stage(tensor) else tensor


def local_named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the names and parameters, of any shape, whose values this rank has; arguments as `named_parameters`."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if not is_off_stage(parameter))


def own_state_dict(model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    """Returns the part of a state dict, tensors of any shape, whose values this rank has."""
    found = model.state_dict(**kwargs)
    return {name: tensor for name, tensor in found.items() if not is_off_stage(tensor)}


def gradients_of(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Does `torch.autograd.grad` by inputs of any shape, some on other ranks, in whose calls this one takes part.

    Raises `UnsupportedError` on a rank that has and trains none of the inputs' model.
    """
    outputs, inputs = own_terms(outputs), (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    asked = [tensor for tensor in inputs if not is_off_stage(tensor)]
    if not asked:
        grad_proxy = inputs[0].owner.any_trained_parameter() if inputs and inputs[0].owner is not None else None
        if grad_proxy is None:
            raise UnsupportedError(
                "torch.autograd.grad or backward(inputs=...) of weights that all lie on other pipeline stages, and of "
                "this stage none is trained: call loss.backward()."
            )
        asked, kwargs = [grad_proxy], {**kwargs, "allow_unused": True}
    found = iter(torch.autograd.grad(outputs, asked, *args, **kwargs))
    return tuple(tensor.gradient() if isinstance(tensor, OffStageTensor) else next(found) for tensor in inputs)


def own_terms(outputs: Any) -> Any:
    """Returns what this rank adds to sums that are differentiated, one or a list of scalars `[]` or edges."""
    if isinstance(outputs, list | tuple):
        return type(outputs)(map(own_terms, outputs))
    return outputs.terms if isinstance(outputs, OffStageTensor) and outputs.terms is not None else outputs

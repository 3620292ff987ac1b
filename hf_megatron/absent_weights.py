"""Weights of other pipeline stages as a model lists them: their names, shapes and dtypes without values.

One process's model lists every weight, and loops that count, freeze, group, copy, average or load weights go through
all of them, by name or by place. What lies on another rank takes part as a tensor on the meta device would; whoever
needs values is told where they are.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .errors import UnsupportedError
from .upstream import draws, make_wrapper, writes_to

_SUMS = {"add", "add_", "sub", "sub_", "rsub"}
_FACTORS = {"mul", "mul_", "div", "div_", "neg", "neg_"}
# What neither reads nor combines values.
_PASSING = {"__get__", "__set__", "detach", "clone", "dim", "size", "requires_grad_", "register_hook"}


class Owner(Protocol):
    """Who knows this rank's parameters of a model."""

    def has_gradients(self) -> bool:
        """Tells whether they have gradients at present; where none is trained, those of other ranks may."""

    def a_trained_parameter(self) -> nn.Parameter | None:
        """Returns one of them, of any shape, that is trained."""


class AbsentTensor(Tensor):
    """A tensor of which this rank knows shape and dtype only.

    Copies, casts and arithmetic make others of its kind, and what writes to one does nothing. In sums that are
    differentiated every rank has its own terms. Reading values, pickling and saving raise `UnsupportedError`.

    Args:
        meta (`Tensor`): of its shape and dtype, on the meta device.
        device (`torch.device`): where it would be.
        place (`str`): where its values are, in words.

    Attributes:
        owner (`Owner`, *optional*): of a model's weight: who knows the model's others.
        weight (`AbsentTensor`, *optional*): of a gradient: what it is of.
        terms (`Tensor`, *optional*): of a sum, a scalar: what this rank adds to it.
    """

    meta: Tensor
    place: str
    owner: Owner | None
    weight: "AbsentTensor | None"
    terms: Tensor | None

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, place: str) -> "AbsentTensor":
        return make_wrapper(cls, meta, device)

    def __init__(self, meta: Tensor, device: torch.device, place: str):
        self.meta, self.place = meta, place
        self._made = self._present = (meta.dtype, device)
        self.owner = self.weight = self.terms = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name in _PASSING:
                result = func(*args, **kwargs)
                if name == "detach":
                    result.weight = args[0].weight
                return result
            if name == "backward" and isinstance(args[0], AbsentTensor):
                return None if args[0].terms is None else args[0].terms.backward(*args[1:], **kwargs)
            if func is torch.autograd.grad:
                return gradients_of(*args, **kwargs)
            if name in _SUMS and all(_is_term(value) for value in args):
                return _add(func, args, kwargs)
            if name in _FACTORS and isinstance(args[0], AbsentTensor) and args[0].terms is not None:
                return _scale(func, args, kwargs)
            if "foreach" in name:
                return _each(func, args, kwargs)
            if any(map(_has_terms, _flat((args, kwargs)))):
                raise _several_stages(name)
            return _call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        found = [value for value in _flat((args, kwargs)) if isinstance(value, AbsentTensor)]
        absent = next((value for value in found if isinstance(value, AbsentActivation)), found[0])
        written = writes_to(func, args, kwargs)
        if any(not isinstance(tensor, AbsentTensor) for tensor in written):
            absent._refuse()
        device = kwargs.get("device") or absent.device
        if draws(func):
            # One process draws these numbers; the next ones are its too.
            result = func(*tree_map(_to_memory, args), **tree_map(_to_memory, kwargs))
        else:
            kwargs |= {"device": torch.device("meta")} if "device" in kwargs else {}
            try:
                result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
            except (RuntimeError, NotImplementedError) as error:
                raise _reading(absent.place) from error
        if written:
            return args[0]
        return absent._others(result, device)

    @property
    def grad(self) -> "AbsentTensor | None":  # type: ignore[override]
        """The gradient, of the tensor's shape, which another rank has as long as this rank has those of its weights."""
        if self.owner is None or not self.requires_grad or not self.owner.has_gradients():
            return None
        return self.gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Leaves it, of any shape, to the rank that has the weight."""

    @grad.deleter
    def grad(self) -> None:
        """Leaves it to the rank that has the weight."""

    def gradient(self) -> "AbsentTensor":
        """Returns what stands for the gradient, of the tensor's shape."""
        gradient = AbsentTensor(self.meta, self.device, self.place)
        gradient.weight = self
        return gradient

    @property
    def data(self) -> "AbsentTensor":  # type: ignore[override]
        """Another of its shape, without a graph behind it."""
        return AbsentTensor(self.meta, self.device, self.place)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Takes over the dtype and device of a tensor of the same shape."""
        if value.shape != self.shape:
            self._refuse()
        self.meta, self._present = self.meta.to(value.dtype), (value.dtype, value.device)

    # Torch cannot change those of a tensor without memory, and casts keep a parameter the object it is.
    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the last cast."""
        return self._present[0]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the last move."""
        return self._present[1]

    def current(self) -> "AbsentTensor":
        """Returns a tensor of its shape whose dtype and device torch knows too."""
        if self._made == self._present:
            return self
        return AbsentTensor(self.meta, self.device, self.place).requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def _others(self, values: Any, device: torch.device) -> Any:
        def make(value: Any) -> Any:
            return type(self)(value.to("meta"), device, self.place) if isinstance(value, Tensor) else value

        return tree_map(make, values)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _reading(self.place)

    # What reads memory without an operator of its own.
    numpy = tolist = data_ptr = untyped_storage = storage = __array__ = __reduce_ex__ = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "AbsentTensor":
        other = AbsentTensor(self.meta, self.device, self.place)
        if self.owner is not None:
            as_parameter(other, self.owner, self.requires_grad)
        return memo.setdefault(id(self), other)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.place})"


class AbsentActivation(AbsentTensor):
    """What a module of another stage makes of inputs, for the call of the model that follows.

    Whatever is made of it with tensors of this rank, prompts that are trained among them, is one of its kind.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def as_parameter(tensor: AbsentTensor, owner: Owner, requires_grad: bool) -> AbsentTensor:
    """Makes a model's parameter of an absent tensor of any shape."""
    tensor._is_param = True  # type: ignore[attr-defined]
    tensor.owner = owner
    tensor.requires_grad_(requires_grad)
    return tensor


def is_absent(tensor: Any) -> bool:
    """Tells whether the values of a tensor of any shape are on another rank."""
    return isinstance(tensor, AbsentTensor)


def own_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the names and parameters, of any shape, whose values this rank has; arguments as `named_parameters`."""
    named = model.named_parameters(remove_duplicate=remove_duplicate)
    return ((name, parameter) for name, parameter in named if not is_absent(parameter))


def own_state_dict(model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    """Returns the part of a state dict, tensors of any shape, whose values this rank has."""
    found = model.state_dict(**kwargs)
    return {name: tensor for name, tensor in found.items() if not is_absent(tensor)}


def gradients_of(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Does `torch.autograd.grad` where inputs, of any shape, may lie on other ranks; this one takes part in their calls.

    Raises `UnsupportedError` on a rank that has and trains none of the inputs' model.
    """
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    asked = [tensor for tensor in inputs if not is_absent(tensor)]
    if not asked:
        stand_in = inputs[0].owner.a_trained_parameter() if inputs and inputs[0].owner is not None else None
        if stand_in is None:
            raise UnsupportedError(
                "torch.autograd.grad or backward(inputs=...) of weights that all lie on other pipeline stages, and of "
                "this stage none is trained: call loss.backward()."
            )
        asked, kwargs = [stand_in], {**kwargs, "allow_unused": True}
    found = iter(torch.autograd.grad(outputs, asked, *args, **kwargs))
    return tuple(tensor.gradient() if isinstance(tensor, AbsentTensor) else next(found) for tensor in inputs)


def _reading(place: str) -> UnsupportedError:
    return UnsupportedError(
        f"The values of this tensor are not on this rank: what it comes from {place}. Of weights, "
        "model.save_pretrained(folder) writes all and Accelerator.get_state_dict(model) gathers them on rank 0; "
        "torch.nn.utils.get_total_norm takes the norm of any gradients. Every rank calls them. "
        "hf_megatron.own_parameters(model) lists what this rank has."
    )


def _several_stages(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} of weights that lie on several pipeline stages, differentiated: each stage knows its own values only. "
        "Sums of terms of one weight each are possible; load the model with pp_size=1 for what is more."
    )


def _flat(value: Any) -> Any:
    found: list[Any] = []
    tree_map(found.append, value)
    return found


def _to_meta(value: Any) -> Any:
    if isinstance(value, AbsentTensor):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies what writes to no tensor of another kind, which would make the absent one a part of its own."""
    if getattr(func, "__name__", "").endswith("_") or "out" in kwargs:
        return func(*args, **kwargs)
    return func(*tree_map(_to_plain, args), **tree_map(_to_plain, kwargs))


def _to_plain(value: Any) -> Any:
    """Returns a split tensor's shape and dtype, and a weight as its last cast left it."""
    if isinstance(value, AbsentTensor):
        return value.current()
    is_split = isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_split else value


def _to_memory(value: Any) -> Any:
    return torch.empty_like(value.meta, device=value.device) if isinstance(value, AbsentTensor) else value


def _each(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies an operator on lists of tensors of any shape to one item after the other."""
    count, edits = len(args[0]), func.__name__.endswith("_")
    results: list[Any] = []
    for index in range(count):

        def item(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

        own, named = [item(value) for value in args], {name: item(value) for name, value in kwargs.items()}
        absent = next(filter(is_absent, _flat((own, named))), None)
        if absent is None:
            results += func(*own, **named) or ()
        elif not edits:
            results += absent._others(func(*tree_map(_to_meta, own), **tree_map(_to_meta, named)), absent.device)
    return None if edits else results


# Sums over weights of several stages, as penalties are: each rank has its own terms, and differentiates those.


def _is_term(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _has_terms(value: Any) -> bool:
    """Tells whether something is differentiated on this rank."""
    if isinstance(value, AbsentTensor):
        return value.terms is not None
    return _is_trained(value)


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _terms(value: Any) -> Any:
    if not isinstance(value, AbsentTensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device) if value.terms is None else value.terms


def _add(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    first, edits = args[0], func.__name__.endswith("_")
    if edits and not is_absent(first) and not any(map(_is_trained, args)) and first.is_floating_point():
        # A sum of constants so far, of which this rank knows some. `+=` goes on with what is returned; who calls the
        # method and reads the tensor itself must not take it for the sum.
        result = _scale(_plain(func), (first.clone(), *args[1:]), kwargs)
        first.fill_(math.nan)
        return result
    if any(map(_has_terms, args)) or any(map(_is_trained, args)) and not is_absent(first):
        every = all(is_absent(value) or not isinstance(value, Tensor) for value in args)
        # With a loss, or a sum that this rank differentiates, it goes on with its own terms alone.
        return _scale(func, args, kwargs) if every or edits and is_absent(first) else func(*map(_terms, args), **kwargs)
    return _call(func, args, kwargs)


def _plain(func: Any) -> Any:
    return getattr(torch, func.__name__.removesuffix("_"))


def _scale(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies a linear operator to an absent scalar and to this rank's terms of it."""
    in_place = func.__name__.endswith("_")
    if func.__name__ in _FACTORS and any(map(_has_terms, args[1:])):
        raise _several_stages(func.__name__)
    plain = _plain(func)
    terms = plain(*map(_terms, args), **kwargs)
    result = args[0] if in_place else _call(plain, args, kwargs)
    result.terms = terms
    return result

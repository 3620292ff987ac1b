"""Operators on off-stage tensors: shape inference, and sums whose terms are spread over ranks."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..compat.torch_dtensor import make_wrapper
from ..errors import UnsupportedError

SUMS = {"add", "add_", "sub", "sub_", "rsub"}
FACTORS = {"mul", "mul_", "div", "div_", "neg", "neg_"}


class OffStage(Tensor):
    """Tensor whose shape and dtype, but not values, are known on this rank.

    Args:
        meta (`Tensor`): meta tensor of this shape and dtype.
        device (`torch.device`): the device it reports.
        place (`str`): description of the rank that holds its values.

    Attributes:
        terms (`Tensor`, *optional*): for a scalar sum: this rank's terms of it.
    """

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, place: str) -> Any:
        return make_wrapper(cls, meta, device)

    def __init__(self, meta: Tensor, device: torch.device, place: str):
        self.meta, self.place = meta, place
        self._made = self._present = (meta.dtype, device)
        self.terms: Tensor | None = None

    # torch cannot change the dtype and device of a tensor without storage, and casts keep the identity of a parameter.
    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype after the last cast."""
        return self._present[0]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device after the last move."""
        return self._present[1]

    def current(self) -> "OffStage":
        """Returns a tensor of this shape whose dtype and device are also known to torch's C++ side."""
        if self._made == self._present:
            return self
        return type(self)(self.meta, self.device, self.place).requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def others(self, values: Any, device: torch.device) -> Any:
        """Replaces tensors of any shape in nested containers by off-stage tensors on `device`."""

        def make(value: Any) -> Any:
            return type(self)(value.to("meta"), device, self.place) if isinstance(value, Tensor) else value

        return tree_map(make, values)


def flat(value: Any) -> list[Any]:
    """Returns the leaves of nested containers as a list."""
    leaves: list[Any] = []
    tree_map(leaves.append, value)
    return leaves


def to_meta(value: Any) -> Any:
    """Converts a tensor to a meta tensor of its shape and dtype; returns other values unchanged."""
    if isinstance(value, OffStage):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function, with sharded tensors replaced by meta tensors unless it writes to an argument.

    Otherwise the sharded tensor's subclass would handle the call and wrap the off-stage tensor as its own shard.
    """
    if getattr(func, "__name__", "").endswith("_") or "out" in kwargs:
        return func(*args, **kwargs)
    return func(*tree_map(_to_plain, args), **tree_map(_to_plain, kwargs))


def _to_plain(value: Any) -> Any:
    """Returns a meta tensor for a sharded tensor, and an off-stage tensor with its current dtype and device."""
    if isinstance(value, OffStage):
        return value.current()
    is_split = isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_split else value


def to_memory(value: Any) -> Any:
    """Returns zeros in an off-stage tensor's shape and dtype; returns other values unchanged."""
    return torch.zeros_like(value.meta, device=value.device) if isinstance(value, OffStage) else value


def each(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies a foreach operator on lists of tensors of any shape to the list items sequentially."""
    count, edits = len(args[0]), func.__name__.endswith("_")
    results: list[Any] = []
    for index in range(count):

        def item(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

        item_args, named = [item(value) for value in args], {name: item(value) for name, value in kwargs.items()}
        off_stage = next(filter(_is_off_stage, flat((item_args, named))), None)
        if edits and off_stage is not None and not _is_off_stage(args[0][index]):
            raise off_stage_values_error(off_stage.place)
        if edits and off_stage is not None:
            # As an in-place operation on a single tensor does.
            torch.autograd.graph.increment_version(args[0][index])
        if off_stage is None:
            results += func(*item_args, **named) or ()
        elif not edits:
            results += off_stage.others(
                func(*tree_map(to_meta, item_args), **tree_map(to_meta, named)), off_stage.device
            )
    return None if edits else results


def off_stage_values_error(place: str) -> UnsupportedError:
    """Returns the error for an operation that needs values held by another rank; `place` describes that rank."""
    return UnsupportedError(
        f"The values of this tensor are not on this rank: its source {place}. Use model.save_pretrained(folder) or "
        "Accelerator.get_state_dict(model) to gather weights, and torch.nn.utils.get_total_norm for gradient norms; "
        "call them on all ranks. hf_megatron.local_named_parameters(model) lists this rank's parameters."
    )


def several_stages(name: str) -> UnsupportedError:
    """Returns the error for an operator that would differentiate values of several ranks."""
    return UnsupportedError(
        f"{name} of weights on several pipeline stages cannot be differentiated: each stage has only its own values. "
        "Sums with one weight per term, also added to a loss, can be scaled and differentiated, but not read on any "
        "rank. For other operations, load the model with pp_size=1."
    )


# Sums over parameters of several stages, such as penalties: each rank holds and differentiates its own terms.


def is_term(value: Any) -> bool:
    """Returns whether a value is a number or a scalar tensor."""
    return not isinstance(value, Tensor) or value.dim() == 0


def has_terms(value: Any) -> bool:
    """Returns whether a value is differentiated on this rank."""
    if isinstance(value, OffStage):
        return value.terms is not None
    return _is_trained(value)


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _terms(value: Any) -> Any:
    if not isinstance(value, OffStage):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device) if value.terms is None else value.terms


def add_terms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Adds or subtracts scalars, some of them off-stage; the values of the result cannot be read on any rank."""
    first, edits = args[0], func.__name__.endswith("_")
    if edits and not _is_off_stage(first) and first.is_floating_point():
        # `+=` continues with the returned tensor. Fill the original with NaN, so that code that reads it instead does
        # not mistake it for the sum.
        result = scale_terms(_plain(func), (first.clone(), *args[1:]), kwargs)
        first.detach().fill_(math.nan)
        return result
    if any(map(has_terms, args)):
        # A sum with a loss, or with terms differentiated on this rank, continues with this rank's terms only.
        return scale_terms(func, args, kwargs)
    return call(func, args, kwargs)


def _plain(func: Any) -> Any:
    return getattr(torch, func.__name__.removesuffix("_"))


def scale_terms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies a linear operator to an off-stage scalar and to this rank's terms of it."""
    in_place = func.__name__.endswith("_")
    if func.__name__ in FACTORS and any(_is_off_stage(value) or has_terms(value) for value in args[1:]):
        raise several_stages(func.__name__)
    plain = _plain(func)
    terms = plain(*map(_terms, args), **kwargs)
    result = args[0] if in_place else call(plain, args, kwargs)
    result.terms = terms
    return result


def _is_off_stage(value: Any) -> bool:
    return isinstance(value, OffStage)

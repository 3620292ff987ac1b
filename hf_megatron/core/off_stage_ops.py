"""What operators make of tensors whose values are on other ranks: others of their kind, and sums of own terms."""

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
    """A tensor of which this rank knows shape and dtype only.

    Args:
        meta (`Tensor`): of its shape and dtype, on the meta device.
        device (`torch.device`): where it would be.
        place (`str`): where its values are, in words.

    Attributes:
        terms (`Tensor`, *optional*): of a sum, a scalar: what this rank adds to it.
    """

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, place: str) -> Any:
        return make_wrapper(cls, meta, device)

    def __init__(self, meta: Tensor, device: torch.device, place: str):
        self.meta, self.place = meta, place
        self._made = self._present = (meta.dtype, device)
        self.terms: Tensor | None = None

    # Torch cannot change those of a tensor without memory, and casts keep a parameter the object it is.
    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Of the last cast."""
        return self._present[0]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the last move."""
        return self._present[1]

    def current(self) -> "OffStage":
        """Returns a tensor of its shape whose dtype and device torch knows too."""
        if self._made == self._present:
            return self
        return type(self)(self.meta, self.device, self.place).requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def others(self, values: Any, device: torch.device) -> Any:
        """Makes others of its kind, on a device, in the place of tensors of any shape."""

        def make(value: Any) -> Any:
            return type(self)(value.to("meta"), device, self.place) if isinstance(value, Tensor) else value

        return tree_map(make, values)


def flat(value: Any) -> list[Any]:
    """Lists what is in nested containers."""
    found: list[Any] = []
    tree_map(found.append, value)
    return found


def to_meta(value: Any) -> Any:
    """Returns a tensor's shape and dtype, on the meta device; other things as they are."""
    if isinstance(value, OffStage):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies what writes to no tensor of another kind, which would make the absent one a part of its own."""
    if getattr(func, "__name__", "").endswith("_") or "out" in kwargs:
        return func(*args, **kwargs)
    return func(*tree_map(_to_plain, args), **tree_map(_to_plain, kwargs))


def _to_plain(value: Any) -> Any:
    """Returns a split tensor's shape and dtype, and a weight as its last cast left it."""
    if isinstance(value, OffStage):
        return value.current()
    is_split = isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_split else value


def to_memory(value: Any) -> Any:
    """Returns memory in an absent tensor's shape and dtype; other things as they are."""
    return torch.zeros_like(value.meta, device=value.device) if isinstance(value, OffStage) else value


def each(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies an operator on lists of tensors of any shape to one item after the other."""
    count, edits = len(args[0]), func.__name__.endswith("_")
    results: list[Any] = []
    for index in range(count):

        def item(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

        own, named = [item(value) for value in args], {name: item(value) for name, value in kwargs.items()}
        off_stage = next(filter(_is_off_stage, flat((own, named))), None)
        if edits and off_stage is not None and not _is_off_stage(args[0][index]):
            raise off_stage_values_error(off_stage.place)
        if edits and off_stage is not None:
            # As an edit of one tensor does.
            torch.autograd.graph.increment_version(args[0][index])
        if off_stage is None:
            results += func(*own, **named) or ()
        elif not edits:
            results += off_stage.others(func(*tree_map(to_meta, own), **tree_map(to_meta, named)), off_stage.device)
    return None if edits else results


def off_stage_values_error(place: str) -> UnsupportedError:
    """Makes the error of what needs values that are at a place."""
    return UnsupportedError(
        f"The values of this tensor are not on this rank: what it comes from {place}. Of weights, "
        "model.save_pretrained(folder) writes all and Accelerator.get_state_dict(model) gathers them on rank 0; "
        "torch.nn.utils.get_total_norm takes the norm of any gradients. Every rank calls them. "
        "hf_megatron.local_named_parameters(model) lists what this rank has."
    )


def several_stages(name: str) -> UnsupportedError:
    """Makes the error of an operator that would differentiate values of several ranks."""
    return UnsupportedError(
        f"{name} of weights that lie on several pipeline stages, differentiated: each stage knows its own values only. "
        "Sums of terms of one weight each, also with a loss, can be scaled and differentiated, and no rank can read "
        "them: read the loss before. Load the model with pp_size=1 for what is more."
    )


# Sums over weights of several stages, as penalties are: each rank has its own terms, and differentiates those.


def is_term(value: Any) -> bool:
    """Tells whether something is a number, or a tensor that is one."""
    return not isinstance(value, Tensor) or value.dim() == 0


def has_terms(value: Any) -> bool:
    """Tells whether something is differentiated on this rank."""
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
    """Adds or subtracts scalars, some of which other ranks have; no rank can read what that makes."""
    first, edits = args[0], func.__name__.endswith("_")
    if edits and not _is_off_stage(first) and first.is_floating_point():
        # `+=` goes on with what is returned; who calls the method and reads the tensor itself must not take it for the
        # sum.
        result = scale_terms(_plain(func), (first.clone(), *args[1:]), kwargs)
        first.detach().fill_(math.nan)
        return result
    if any(map(has_terms, args)):
        # With a loss, or a sum that this rank differentiates, it goes on with its own terms alone.
        return scale_terms(func, args, kwargs)
    return call(func, args, kwargs)


def _plain(func: Any) -> Any:
    return getattr(torch, func.__name__.removesuffix("_"))


def scale_terms(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Applies a linear operator to an absent scalar and to this rank's terms of it."""
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

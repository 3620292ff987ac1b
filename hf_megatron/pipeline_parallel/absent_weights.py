"""Weights of other stages as a model's state dict shows them: their names, shapes and dtypes without values.

One process's state dict has every name, and loops that copy, average or load state dicts go through all of them. What
lies on another rank takes part as a tensor on the meta device would; whoever needs values is told where they are.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import UnsupportedError
from ..upstream import make_wrapper, writes_to


class AbsentTensor(Tensor):
    """A tensor of which this rank knows shape and dtype only.

    Copies, casts and arithmetic make others of its kind; reading values, pickling and saving raise `UnsupportedError`.

    Args:
        meta (`Tensor`): of its shape and dtype, on the meta device.
        device (`torch.device`): where it would be.
        place (`str`): where its values are, in words.
    """

    meta: Tensor
    place: str

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, place: str) -> "AbsentTensor":
        return make_wrapper(cls, meta, device)

    def __init__(self, meta: Tensor, device: torch.device, place: str):
        self.meta, self.place = meta, place

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        absent = next(value for value in _flat((args, kwargs)) if isinstance(value, AbsentTensor))
        written = writes_to(func, args, kwargs)
        if any(not isinstance(tensor, AbsentTensor) for tensor in written):
            absent._refuse()
        device = kwargs.get("device") or absent.device
        kwargs |= {"device": torch.device("meta")} if "device" in kwargs else {}
        try:
            result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise _reading(absent.place) from error
        if written:
            return args[0]
        return tree_map(lambda value: cls(value, device, absent.place) if isinstance(value, Tensor) else value, result)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _reading(self.place)

    # What reads memory without an operator of its own.
    numpy = tolist = data_ptr = untyped_storage = storage = __array__ = __reduce_ex__ = _refuse  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> "AbsentTensor":
        return AbsentTensor(self.meta.clone(), self.device, self.place)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"AbsentTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.place})"


def _reading(place: str) -> UnsupportedError:
    return UnsupportedError(
        f"The values of this tensor are not on this rank: what it comes from {place}. Of weights, "
        "model.save_pretrained(folder) writes all and Accelerator.get_state_dict(model) gathers them on rank 0; every "
        "rank calls them. named_parameters() has what this rank holds."
    )


def _flat(value: Any) -> Any:
    found: list[Any] = []
    tree_map(found.append, value)
    return found


def _to_meta(value: Any) -> Any:
    if isinstance(value, AbsentTensor):
        return value.meta
    return value.to("meta") if isinstance(value, Tensor) else value


def own_state_dict(model: nn.Module, **kwargs: Any) -> dict[str, Tensor]:
    """Returns the part of a state dict, tensors of any shape, whose values this rank has."""
    found = model.state_dict(**kwargs)
    return {name: tensor for name, tensor in found.items() if not isinstance(tensor, AbsentTensor)}


class PartElsewhere(UnsupportedError, AttributeError):
    """A part of a module that lies on another stage; `hasattr` answers no."""


class Progress(Protocol):
    """Tells whether a model's weights are loaded, until when no loader must look for weights of other stages."""

    is_filled: bool


class Placeholder(nn.Module):
    """Stands where another rank's module is: no parameters, its names in state dicts.

    Args:
        module (`nn.Module`): the one it stands for, on the meta device.
        place (`str`): where that is, in words.
        progress (`Progress`): of the model.
    """

    def __init__(self, module: nn.Module, place: str, progress: Progress):
        super().__init__()
        self._kind, self._place, self._progress = type(module).__name__, place, progress
        self._weights = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
        self._dtype = first_dtype(module)
        # Follows the model's dtype and device.
        self.register_buffer("_follower", torch.empty(0, dtype=self._dtype), persistent=False)

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_weights", {})
        if name in known and self._progress.is_filled:
            return self._absent(known[name])
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("_") or "_place" not in self.__dict__:
                raise
            raise self._elsewhere(name) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter | nn.Module) and self._progress.is_filled:
            raise self._elsewhere(name)
        super().__setattr__(name, value)

    def _absent(self, weight: Tensor) -> AbsentTensor:
        follower = self.get_buffer("_follower")
        if weight.is_floating_point() and follower.dtype != self._dtype:
            weight = weight.to(follower.dtype)
        return AbsentTensor(weight, follower.device, self._place)

    def _elsewhere(self, name: str) -> "PartElsewhere":
        return PartElsewhere(
            f"{name} of a {self._kind}: it {self._place}, and this rank has the names, shapes and dtypes of its "
            "weights only (model.state_dict()). Read and change it on the ranks of that stage, or load the model with "
            "pp_size=1."
        )

    def standing_for(self, module: nn.Module) -> "Placeholder":
        """Makes the placeholder of a module that is exchanged for this one's on the ranks that have it."""
        return type(self)(module, self._place, self._progress)

    def hold_part(self, name: str, part: "Placeholder") -> None:
        """Leaves a child's names to a placeholder of its own."""
        self.add_module(name, part)
        self._weights = {own: tensor for own, tensor in self._weights.items() if not own.startswith(f"{name}.")}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self._progress.is_filled:
            return
        for name, tensor in self._weights.items():
            destination[prefix + name] = self._absent(tensor)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Finds what one process would find wrong; there is nothing to load."""
        if not self._progress.is_filled:
            return
        for name, tensor in self._weights.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.extend([prefix + name] if strict else [])
            elif value.shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {value.shape} from checkpoint, the "
                    f"shape in current model is {tensor.shape}."
                )
        if strict:
            parts = tuple(f"{name}." for name, _ in self.named_children())
            names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
            surplus = [name for name in names if name not in self._weights and not name.startswith(parts)]
            unexpected_keys.extend(prefix + name for name in surplus)


def first_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the dtype of a module's first parameter, else of its first buffer."""
    return next((tensor.dtype for tensors in (module.parameters(), module.buffers()) for tensor in tensors), None)

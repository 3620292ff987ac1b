"""Nested Python state in one safetensors file: tensors as tensors, the structure as JSON in its header.

The states of schedulers, scalers, samplers and RNGs consist of a few types, which are written directly. Other types
would need pickle, and raise an error with their location in the state.
"""

import collections
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError

_PLAIN = (bool, int, float, str)


def pack(value: Any, tensors: dict[str, Tensor], place: str = "state") -> Any:
    """Returns a JSON value for `value`; its tensors, of any shape, are added to `tensors`.

    Raises:
        CheckpointError: the value contains something other than numbers, text, lists, tuples, mappings, tensors and
            arrays.
    """
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return {"scalar": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
        tensors[place] = value.detach().cpu().contiguous().clone()
        return {"tensor": place}
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        # safetensors' torch API does not support uint32, which numpy's generator state uses.
        wide = value.astype(numpy.int64) if value.dtype.kind in "iu" else value
        tensors[place] = torch.from_numpy(numpy.ascontiguousarray(wide))
        return {"array": place, "dtype": str(value.dtype)}
    if type(value) in (list, tuple):
        items = [pack(item, tensors, f"{place}.{index}") for index, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, collections.Counter) else "dict"
        if any(type(key) not in _PLAIN for key in value):
            raise CheckpointError(
                f"{place} has a key that is neither a number nor a string; it cannot be stored without pickle."
            )
        return {kind: [[key, pack(item, tensors, f"{place}.{key}")] for key, item in value.items()]}
    if isinstance(value, _PLAIN):
        # Subclasses such as string enums compare equal to their plain value.
        return next(base(value) for base in _PLAIN if isinstance(value, base))
    raise CheckpointError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without pickle. "
        "Return numbers, strings, lists, mappings, tensors or arrays from state_dict()."
    )


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restores the value that `pack` converted to a JSON value and tensors of any shape."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if "scalar" in packed:
        return torch.tensor(packed["scalar"], dtype=getattr(torch, packed["dtype"]))
    if "tensor" in packed:
        return tensors[packed["tensor"]]
    if "array" in packed:
        return tensors[packed["array"]].numpy().astype(packed["dtype"])
    if "tuple" in packed:
        return tuple(unpack(item, tensors) for item in packed["tuple"])
    (kind, items), *_ = packed.items()
    mapping = {key: unpack(item, tensors) for key, item in items}
    return collections.Counter(mapping) if kind == "counter" else mapping


def write_packed(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a nested state to one file."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(value, tensors))
    save_file(tensors, path, metadata={"state": text})


def read_packed(path: str | os.PathLike[str]) -> Any:
    """Reads a file of `write_packed`; raises `CheckpointError` if it is missing or holds something else."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copied, so that the tensors no longer depend on the file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no iterator
        return unpack(json.loads(metadata["state"]), tensors)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing from the checkpoint.") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a state file of this library: {error}") from error

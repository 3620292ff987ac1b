"""Identity of the frozen base model of adapters: digests of its shapes and weights, independent of the layout."""

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.placement import ADAPTER
from ..parallel_state import ParallelState, parallel_state
from .local_shards import model_pieces, named_tensors

_NAME = "base identity"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_identity(model: Any) -> dict[str, Any]:
    """Returns the name of a base model and digests of its shapes and weights; collective.

    The weights are read only once, because they are frozen.
    """
    state = parallel_state(model)
    assert state is not None
    if _NAME not in state.placed:
        # Use shapes without names: PEFT's tuner layers rename the linears inside of them.
        shapes = [sharding.shape for sharding in state.shardings.values() if sharding.style != ADAPTER]
        state.placed[_NAME] = _identity(model, shapes, _sum_weights(model, state))
    return dict(state.placed[_NAME])


def forget_identity(state: ParallelState) -> None:
    """Discards the digests of a base model whose weights were replaced."""
    state.placed.pop(_NAME, None)


def identity_in_one_process(model: Any, prefix: str) -> dict[str, Any]:
    """Returns the identity of a base model that is not parallelized.

    Args:
        prefix: prefix of the adapter's parameter names.
    """

    def is_base_name(name: str) -> bool:
        return not any(part.startswith((prefix, "modules_to_save", "trainable_tokens_")) for part in name.split("."))

    named = model.named_parameters(remove_duplicate=False)
    shapes = [tuple(parameter.shape) for name, parameter in named if is_base_name(name)]
    frozen = (tensor for name, tensor in named_tensors(model) if is_base_name(name) and not tensor.requires_grad)
    return _identity(model, shapes, sum(_sum_as_int(tensor.detach()) for tensor in frozen))


def _identity(model: Any, shapes: list[tuple[int, ...]], total: int) -> dict[str, Any]:
    return {
        "name": model.config.name_or_path,
        "shapes": hashlib.blake2b(json.dumps(sorted(shapes)).encode(), digest_size=16).hexdigest(),
        "weights": f"{total % 2**64:016x}",
    }


def _sum_weights(model: Any, state: ParallelState) -> int:
    """Sums the entries of all weights as integers, so the result is independent of the order and number of ranks."""
    total, trained = 0, {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for piece in model_pieces(model):
        sharding = state.shardings.get(piece.name)
        if piece.name not in trained and (sharding is None or sharding.style != ADAPTER):
            total += _sum_as_int(piece.data)
    checksum = torch.tensor(_as_signed(total), dtype=torch.int64, device=state.mesh.device)
    dist.all_reduce(checksum)
    return int(checksum) % 2**64


def _sum_as_int(data: Tensor) -> int:
    data = data.contiguous()
    return int(data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))


def _as_signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63

"""Which frozen base adapters sit on: shapes and every weight of it in two digests, the same on every layout."""

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from ..parallel_state import ParallelState, parallel_state
from ..placement import ADAPTER
from .boxes import Piece
from .holdings import model_pieces

_NAME = "base identity"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def base_identity(model: Any) -> dict[str, Any]:
    """Returns the name of a base and digests of its shapes and weights; every rank calls it.

    The weights are read once: nobody trains them.
    """
    state = parallel_state(model)
    assert state is not None
    if _NAME not in state.placed:
        # Inside of tuner layers linears have other names than before.
        shapes = sorted(claim.shape for claim in state.claims.values() if claim.style != ADAPTER)
        state.placed[_NAME] = {
            "name": model.config.name_or_path,
            "shapes": hashlib.blake2b(json.dumps(shapes).encode(), digest_size=16).hexdigest(),
            "weights": f"{_sum_of_weights(model, state):016x}",
        }
    return dict(state.placed[_NAME])


def _sum_of_weights(model: Any, state: ParallelState) -> int:
    """Adds up the entries of all weights as integers, which has one result in any order and on any number of ranks."""
    total, trained = 0, {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for piece in model_pieces(model):
        claim = state.claims.get(piece.name)
        if piece.name not in trained and (claim is None or claim.style != ADAPTER):
            total += _sum_of(piece)
    found = torch.tensor(_as_signed(total), dtype=torch.int64, device=state.mesh.device)
    dist.all_reduce(found)
    return int(found) % 2**64


def _sum_of(piece: Piece) -> int:
    data = piece.data.contiguous()
    return int(data.view(_INTEGERS[data.element_size()]).sum(dtype=torch.int64))


def _as_signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63

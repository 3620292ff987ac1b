"""Reader of a recorded step: gathers the full tensors from the chunks that all ranks wrote."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import ConfigError
from .rank_files import read_json
from .recording import RECORDING, RecordedPiece

# Key of a recorded tensor: kind, name, call.
Event = tuple[str, str, int]


# Equal-sized chunks of two ranks with a larger relative difference are shards of one tensor, not copies.
_ALIKE = 0.1


@dataclass(frozen=True)
class OfRank:
    """A chunk and the rank that wrote it."""

    rank: int
    piece: RecordedPiece


class Recording:
    """A recording that `StepRecorder` wrote.

    Args:
        directory: folder with the files of all ranks.

    Raises:
        ConfigError: there is no recording, or a rank's files are missing.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        files = sorted(self.directory.glob("rank*.json"))
        if not files:
            raise ConfigError(f"{str(directory)!r} has no recording of StepRecorder.")
        headers = {int(file.stem.removeprefix("rank")): read_json(file, RECORDING, dict) for file in files}
        first = headers[min(headers)]
        if missing := sorted({*range(first["ranks"])} - headers.keys()):
            raise ConfigError(
                f"{str(directory)!r} has recordings of {first['ranks']} ranks, but rank {missing[0]} is missing."
            )
        self.model, self.layout, self.version = first["model"], first["layout"] or "one process", first["version"]
        self.averaging_ranks: int = first["factor"]
        self.losses = _losses(headers)
        self.depth = max((values["depth"] for values in headers.values()), default=0)
        self._files: dict[int, Any] = {}
        # In execution order; with a pipeline, later stages come last.
        self.events: dict[Event, list[OfRank]] = {}
        for rank, values in headers.items():
            for piece in map(_piece, values["pieces"]):
                event = piece.kind, first["tied"].get(piece.name, piece.name), piece.call
                self.events.setdefault(event, []).append(OfRank(rank, piece))

    def _stored(self, chunk: OfRank) -> Tensor:
        if chunk.rank not in self._files:
            file = self.directory / f"rank{chunk.rank:05}.safetensors"
            self._files[chunk.rank] = safe_open(file, "pt").__enter__()
        stored: Tensor = self._files[chunk.rank].get_tensor(chunk.piece.key)
        return stored

    def dtype(self, chunk: OfRank) -> torch.dtype:
        """Returns the dtype in which a chunk was computed."""
        return self._stored(chunk).dtype

    def read(self, chunk: OfRank) -> Tensor:
        """Reads a chunk in fp64; hidden states are returned as `[samples, tokens, features]`."""
        values = self._stored(chunk).double()
        if len(chunk.piece.held) == 3 and values.dim() == 2:
            rows = sum(stop - start for start, stop in chunk.piece.held[0] or ())
            values = values.view(rows, -1, values.shape[-1])
        return values

    def unsharded(self, event: Event) -> Tensor:
        """Gathers a full tensor; NaN where no rank has an entry. If chunks overlap, the first one counts.

        NaN values that a rank recorded become infinite, to distinguish them from missing entries.
        """
        pieces = self.events[event]
        values = [self.read(one) for one in pieces]
        width = _width(pieces, values)
        places = [compute_indices(one.piece, value, width) for one, value in zip(pieces, values, strict=True)]
        dims = range(len(places[0]))
        sizes = [1 + max((int(place[dim].max()) for place in places if len(place[dim])), default=-1) for dim in dims]
        unsharded = torch.full(sizes, torch.nan, dtype=torch.float64)
        for value, place in reversed([*zip(values, places, strict=True)]):
            unsharded[_crossed(place)] = torch.where(value.isnan(), torch.inf, value)
        return unsharded


def compute_indices(piece: RecordedPiece, values: Tensor, width: int) -> list[Tensor]:
    """Returns for each dim of a chunk the indices of its entries in the full tensor.

    Args:
        width (`int`): size of the full tensor's last dim, from which to tell a shard of that dim from a copy.
    """
    places = []
    for dim, held in enumerate(piece.held):
        if held is not None:
            places.append(torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in held)]))
            continue
        (index, count), size = piece.share, values.shape[dim]
        places.append(torch.arange(size) + (index * size if size * count == width and count > 1 else 0))
    return places


def part_of(unsharded: Tensor, places: Sequence[Tensor]) -> Tensor | None:
    """Returns the entries of a tensor at the outer product of indices; `None` if an index is out of range."""
    if len(places) != unsharded.dim():
        return None
    if any(len(place) and int(place.max()) >= size for place, size in zip(places, unsharded.shape, strict=True)):
        return None
    return unsharded[_crossed(places)]


def _crossed(places: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        place.view([-1 if dim == other else 1 for other in range(len(places))]) for dim, place in enumerate(places)
    )


def _width(pieces: Sequence[OfRank], values: Sequence[Tensor]) -> int:
    """Returns the size of the full last dim: the local size, unless ranks that may shard it recorded other values."""
    local_width = values[0].shape[-1] if values[0].dim() else 1
    first = pieces[0].piece
    if not first.held or first.held[-1] is not None or first.share[1] == 1:
        return local_width
    for one, value in zip(pieces, values, strict=True):
        if one.piece.share[0] != first.share[0] and one.piece.held == first.held and value.shape == values[0].shape:
            difference = (value - values[0]).norm() / values[0].norm().clamp(min=1e-30)
            return local_width if float(difference) < _ALIKE else local_width * first.share[1]
    return local_width


def _piece(values: dict[str, Any]) -> RecordedPiece:
    held = tuple(None if part is None else tuple((start, stop) for start, stop in part) for part in values["held"])
    return RecordedPiece(**values | {"held": held, "share": tuple(values["share"])})


def _losses(headers: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Returns the loss of each rank; the terms of one loss are summed over data-parallel replicas."""
    # The key holds the data-parallel rank of a term, so that other ranks of a replica count once.
    terms = {values["share_of_loss"]: values["loss"] for values in headers.values()}
    total = math.fsum(terms.values())
    return {rank: values["loss"] if values["share_of_loss"] is None else total for rank, values in headers.items()}

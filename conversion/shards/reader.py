"""Reader of `shard-*.safetensors` folders written by several transformers ranks (its `distributed/checkpoint.py`).

Each file has the chunks of one rank under the model's names in memory; their offsets are in its header (torch's
`HuggingFaceStorageWriter`).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.tensor_chunks import TensorChunk
from ...core.io.random_access_file import DataFile, read_strided, row_major
from ...core.io.safe_paths import inside
from ...core.io.safetensors import Location, read_header, read_metadata
from ...core.text import error_summary, safe_repr
from ...errors import CheckpointError
from ..chunks import Chunk, ChunkedTensors
from ..interfaces import same_bytes

SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


def is_shard_folder(path: Path) -> bool:
    """Checks whether a folder has files of this kind."""
    return any(SHARD.fullmatch(name) for name in os.listdir(path))


class ShardFolder(ChunkedTensors):
    """The weights of such a folder.

    Raises:
        CheckpointError: naming the file and the tensor, for damaged headers and chunks that do not fit together.
    """

    def __init__(self, path: Path):
        chunks: dict[str, list[Chunk]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for file in sorted(inside(path, name) for name in os.listdir(path) if SHARD.fullmatch(name)):
            offsets = _offsets(file)
            for name, span in read_header(file).items():
                offset = offsets.get(name, (0,) * len(span.shape))
                if len(offset) != len(span.shape) or dtypes.setdefault(name, span.dtype) != span.dtype:
                    raise CheckpointError(
                        f"{file}: {safe_repr(name)} differs from other files in its number of dimensions or dtype."
                    )
                if not all(type(start) is int and start >= 0 for start in offset):
                    raise CheckpointError(
                        f"{file}: {safe_repr(name)} has the invalid offset {safe_repr(offset)} in the full tensor."
                    )
                chunks.setdefault(name, []).append(Chunk(TensorChunk(offset, span.shape), ((file, span),)))
        # The format does not store global shapes: a tensor ends where its last chunk ends.
        shapes = {
            name: tuple(
                max(chunk.box.offset[dim] + chunk.box.shape[dim] for chunk in name_chunks)
                for dim in range(len(name_chunks[0].box.shape))
            )
            for name, name_chunks in chunks.items()
        }
        super().__init__(str(path), {name: (shapes[name], dtypes[name], _once(chunks[name])) for name in chunks})

    def read_chunk(self, name: str, chunk: Chunk, starts: Sequence[int], target: Tensor) -> None:
        (first, span), *copies = chunk.place
        _read(first, span, starts, target)
        for path, span in copies:
            copy = torch.empty_like(target)
            _read(path, span, starts, copy)
            if not same_bytes(copy, target):
                raise CheckpointError(f"{path}: {name} differs from its copy in {first.name}.")


def _once(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Merges the locations of identical chunks: tensors that are not distributed are in every file."""
    places: dict[TensorChunk, list[tuple[Path, Location]]] = {}
    for chunk in chunks:
        places.setdefault(chunk.box, []).extend(chunk.place)
    return [Chunk(box, tuple(locations)) for box, locations in places.items()]


def _read(path: Path, span: Location, starts: Sequence[int], target: Tensor) -> None:
    with DataFile(path) as file:
        stride = row_major(span.shape)
        first = sum(start * step for start, step in zip(starts, stride, strict=True))
        read_strided(file, span.start, first, stride, target)


def _offsets(path: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the offsets of a file's tensors in the global ones; empty if its header has none."""
    metadata = read_metadata(path)
    try:
        table: dict[str, Any] = json.loads(metadata.get(_SHARDING, "{}"))
        return {name: tuple(entry["saved_offsets"]) for name, entry in table.items()}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: the header has no valid offsets of its tensors: {error_summary(error)}."
        ) from error

"""Reader of `torch.distributed.checkpoint` folders, global tensors in chunks, without torch's loaders.

`.metadata` is a pickle, which torch would execute; here it is only parsed (`safe_pickle`). The accepted class names
are the ones that torch, transformers, Accelerate and megatron-core 0.15 and 0.16 write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.tensor_chunks import TensorChunk
from ...core.io.random_access_file import DataFile
from ...core.io.safe_paths import inside
from ...core.io.safetensors import MOST_TENSORS
from ...core.text import error_summary
from ...errors import CheckpointError
from ..chunks import Chunk, ChunkedTensors
from ..torch_files.blob import Blob
from ..torch_files.safe_pickle import Named, Names, Record, enumeration_names, record_names, unpickle
from ..torch_files.torch_save import DTYPES

METADATA = ".metadata"
LARGEST_METADATA = 1 << 30

_DCP = "torch.distributed.checkpoint"
_PLANS = "megatron.core.dist_checkpointing.strategies.torch"
_TENSOR = f"{_DCP}.metadata.TensorStorageMetadata"
_NAMES: Names = MappingProxyType(
    {
        **DTYPES,
        "torch.Size": Named("torch.Size", lambda arguments: tuple(arguments[0])),
        **record_names(
            f"{_DCP}.metadata.Metadata",
            f"{_DCP}.metadata.MetadataIndex",
            f"{_DCP}.metadata.BytesStorageMetadata",
            f"{_DCP}.metadata.ChunkStorageMetadata",
            f"{_DCP}.metadata.TensorProperties",
            f"{_DCP}.metadata.StorageMeta",
            f"{_DCP}.filesystem._StorageInfo",
            # Save plans that megatron-core stores in the metadata.
            f"{_DCP}.planner.SavePlan",
            f"{_DCP}.planner.WriteItem",
            f"{_DCP}.planner.TensorWriteData",
            f"{_DCP}.planner.BytesIOWriteData",
            "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
            "torch.serialization._get_layout",
            "pathlib.Path",
            "pathlib.PosixPath",
            "pathlib._local.PosixPath",
            # Up to megatron-core 0.15.
            f"{_PLANS}.MCoreMetadata",
            f"{_PLANS}.MCoreSavePlan",
        ),
        **enumeration_names(
            f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
            f"{_DCP}.planner.WriteItemType",
            "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        ),
    }
)


@dataclass(frozen=True)
class Place:
    """Location of a blob."""

    file: str
    offset: int
    length: int


class StoreReader(ChunkedTensors):
    """A folder with a `.metadata` file.

    Args:
        most: maximum number of tensors; a pickle with more is rejected while it is parsed.

    Attributes:
        entries: global shapes and dtypes of all tensors.
        objects: names of everything else.
        paths: paths of tensors and objects in the nested dicts that were saved (`planner_data`).

    Raises:
        CheckpointError: naming the file and the tensor, if the chunks of a tensor do not cover it exactly, or lie
            outside the folder or past the end of their file, or if the file is damaged or names other classes.
    """

    def __init__(self, path: Path, most: int = MOST_TENSORS):
        self.path = path
        self._where = str(path / METADATA)
        with DataFile(path / METADATA) as file:
            if file.size > LARGEST_METADATA:
                raise CheckpointError(
                    f"{self._where} has {file.size:,} bytes, more than the maximum of {LARGEST_METADATA:,}."
                )
            names = {**_NAMES, _TENSOR: Named(_TENSOR, most=most, plural="tensors")}
            metadata = unpickle(file.read(0, file.size), self._where, names)
        self._sizes: dict[str, int] = {}
        try:
            places = self._places(metadata["storage_data"])
            items: Mapping[str, Record] = metadata["state_dict_metadata"]
            tensors = {
                name: (tuple(item["size"]), _dtype(item), self._chunks(name, item, places))
                for name, item in items.items()
                if item.kind.endswith(".TensorStorageMetadata")
            }
            self._objects = {
                name: places[name, None] for name, item in items.items() if item.kind.endswith(".BytesStorageMetadata")
            }
            paths = metadata.get("planner_data") or {}
            self.paths = {name: tuple(path) for name, path in paths.items() if name in items}
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{self._where} is not valid checkpoint metadata: {error_summary(error)}.") from error
        super().__init__(self._where, tensors)
        self.objects = frozenset(self._objects)

    def _places(self, storage: Mapping[Record, Record]) -> dict[tuple[str, str | None], Place]:
        places = {}
        for index, info in storage.items():
            if info.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self._where}: {index['fqn']} is stored with transforms, which are not supported."
                )
            place = Place(info["relative_path"], info["offset"], info["length"])
            are_ints = type(place.offset) is int and type(place.length) is int
            if not (are_ints and isinstance(place.file, str) and isinstance(index["fqn"], str)):
                raise ValueError(f"{index['fqn']} has the invalid location {place}")
            if place.file not in self._sizes:
                with DataFile(inside(self.path, place.file)) as file:
                    self._sizes[place.file] = file.size
            size = self._sizes[place.file]
            if place.offset < 0 or place.length < 0 or place.offset + place.length > size:
                raise CheckpointError(
                    f"{self.path / place.file} has {size} bytes, but {index['fqn']} is at bytes "
                    f"[{place.offset}, {place.offset + place.length})."
                )
            places[index["fqn"], _spelled(index.get("offset"))] = place
        return places

    def _chunks(self, name: str, item: Record, places: Mapping[tuple[str, str | None], Place]) -> list[Chunk]:
        chunks = []
        boxes = [TensorChunk(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in item["chunks"]]
        for (offset, _), box in {(_spelled(box.offset), _spelled(box.shape)): box for box in boxes}.items():
            place = places[name, offset]
            if place.length < box.numel * _dtype(item).itemsize:
                raise CheckpointError(
                    f"{self._where}: {name} has a chunk of {list(box.shape)} {_dtype(item)} in only {place.length} "
                    "bytes."
                )
            chunks.append(Chunk(box, place))
        return chunks

    def read_chunk(self, name: str, chunk: Chunk, starts: Sequence[int], target: Tensor) -> None:
        place: Place = chunk.place
        with DataFile(inside(self.path, place.file)) as file:
            blob = Blob(file, place.offset, place.length)
            stored = blob.tensor()
            if (stored.shape, stored.dtype) != (chunk.box.shape, target.dtype):
                raise CheckpointError(
                    f"{file.path}: {name} has a chunk of {list(stored.shape)} {stored.dtype}, expected "
                    f"{list(chunk.box.shape)} {target.dtype}."
                )
            blob.read_into(stored, starts, target)

    def read_object(self, name: str) -> Any:
        """Reads an object by name; see `Blob.value`."""
        place = self._objects[name]
        with DataFile(inside(self.path, place.file)) as file:
            return Blob(file, place.offset, place.length).value


def _spelled(values: Sequence[int] | None) -> str | None:
    """Returns integers from a file as a dict key; strings, because a file could choose integers with equal hashes."""
    return None if values is None else ",".join(map(str, values))


def _dtype(item: Record) -> torch.dtype:
    properties = item["properties"].state
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor has the invalid dtype {dtype}")
    return dtype

"""Writer of `torch.distributed.checkpoint` folders, chunk by chunk."""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...checkpoint.tensor_chunks import TensorChunk
from ...compat.torch_distributed import dcp_version
from ...compat.torch_memory import storage_info
from ...core.io.checksums import NewFile
from ...errors import CheckpointError
from ..chunks import check_cover
from ..output_folder import Output
from ..torch_files.archive_writer import write_object, write_tensor
from .store_reader import METADATA

# A new file is started once the current one has this size in bytes.
FILE_SIZE = 8 << 30


class StoreWriter:
    """A folder that `torch.distributed.checkpoint.load` and megatron-core can read.

    Args:
        output: the directory it becomes part of.
        folder: its path inside that directory, with a trailing slash; the directory itself by default.
        file_size: size in bytes at which a new file is started.
    """

    def __init__(self, output: Output, folder: str = "", file_size: int = FILE_SIZE):
        self._output, self._folder, self._file_size = output, folder, file_size
        self._file: NewFile | None = None
        self._names: list[str] = []
        self._items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, Any] = {}

    def write_chunk(self, name: str, shape: Sequence[int], offsets: Sequence[int], tensor: Tensor) -> None:
        """Writes a box of the global tensor with this name and shape.

        Args:
            offsets: start of the box in the global tensor.
            tensor: the box, of any shape; leading dims of length 1 may be missing.
        """
        tensor = tensor.reshape((1,) * (len(shape) - tensor.dim()) + tensor.shape)
        properties = TensorProperties(dtype=tensor.dtype)
        item = self._items.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
        index = MetadataIndex(name, offsets)
        if not isinstance(item, TensorStorageMetadata) or index in self._places:
            raise CheckpointError(f"{name} at offset {list(offsets)} was written twice.")
        if (tuple(item.size), item.properties.dtype) != (tuple(shape), tensor.dtype):
            raise CheckpointError(f"{name} has chunks with different global shapes or dtypes.")
        item.chunks.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
        file = self._open()
        self._places[index] = storage_info(self._names[-1], *write_tensor(file, tensor))

    def write_object(self, name: str, value: Any) -> None:
        """Writes a small object under its own name."""
        if name in self._items:
            raise CheckpointError(f"{name} was written twice.")
        self._items[name] = BytesStorageMetadata()
        file = self._open()
        self._places[MetadataIndex(name)] = storage_info(self._names[-1], *write_object(file, value))

    def _open(self) -> NewFile:
        """Returns the current output file."""
        if self._file is None or self._file.size >= self._file_size:
            if self._file is not None:
                self._file.close()
            self._names.append(f"__0_{len(self._names)}.distcp")
            self._file = self._output.create(self._folder + self._names[-1])
        return self._file

    def finish(self, paths: Mapping[str, tuple[str | int, ...]] | None = None) -> None:
        """Writes `.metadata`.

        Args:
            paths: paths of tensors and objects in the nested dicts that torch flattened (`planner_data`); a name is
                its path joined by dots.

        Raises:
            CheckpointError: naming a tensor with missing chunks.
        """
        for name, item in self._items.items():
            if isinstance(item, TensorStorageMetadata):
                check_cover(name, item.size, [TensorChunk(tuple(c.offsets), tuple(c.sizes)) for c in item.chunks])
        # An empty StorageMeta keeps the local folder path out of the file, which torch would record.
        metadata = Metadata(dict(self._items), paths, self._places, StorageMeta(), dcp_version())
        self._output.add(f"{self._folder}{METADATA}", pickle.dumps(metadata, protocol=4))

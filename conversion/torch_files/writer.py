"""Writes tensors and small objects one after another into a file, each as `torch.save` would."""

import io
from typing import Any

import torch
from torch import Tensor

from ...core.io.checksums import NewFile
from ...core.io.safetensors import TensorMeta
from .archive_writer import ArchiveWriter, StorageSlot


def write_object(file: NewFile, value: Any) -> tuple[int, int]:
    """Appends a small object, and returns where it begins and how long it is."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return file.tell(), file.write(buffer.getbuffer())


def write_tensor(file: NewFile, tensor: Tensor) -> tuple[int, int]:
    """Appends a tensor of any shape, and returns where it begins and how long it is; copies what is not contiguous.

    Raises:
        CheckpointError: for a dtype that cannot be stored.
    """
    tensor, start = tensor.detach().contiguous(), file.tell()
    archive = ArchiveWriter(file, StorageSlot(0, TensorMeta.of(tensor)))
    archive.append(0, [tensor])
    archive.finish()
    return start, file.tell() - start

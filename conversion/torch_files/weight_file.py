"""`.bin` weight files: pickles that hold tensors and nothing else, mapped into memory."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files.buffers import FRESH, Memory
from ...files.safetensors import Location


class PickledFile:
    """A `pytorch_model.bin`, opened with `weights_only`.

    Raises:
        CheckpointError: the file is damaged, or holds anything but a table of tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path} is refused: {error}") from error
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise CheckpointError(f"{path} is refused: it holds more than a table of tensors.")
        self._tensors: dict[str, Tensor] = content
        self.locations: Mapping[str, Location] = {
            name: Location(tuple(tensor.shape), tensor.dtype) for name, tensor in content.items()
        }

    def read(self, name: str, memory: Memory = FRESH) -> Tensor:
        """Returns a whole tensor of any shape, mapped from the file."""
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}

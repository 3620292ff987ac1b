"""`.bin` weight files: pickles that hold tensors and nothing else, whose bytes are read on demand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.io.buffer_pool import FRESH, Memory
from ...core.io.random_access_file import DataFile
from ...core.io.safetensors import Location, check_count
from ...errors import CheckpointError
from .blob import Blob
from .legacy_stream import Stream
from .torch_save import Saved, StoredTensor


class PickledFile:
    """A `pytorch_model.bin`, of any version of torch.

    Raises:
        CheckpointError: the file is damaged, or holds anything but a table of tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = DataFile(path)
        try:
            self._saved = open_saved(self._file)
            content = self._saved.value
            check_count(path, len(content) if isinstance(content, dict) else 0)
            if not isinstance(content, dict) or not all(
                isinstance(name, str) and isinstance(value, StoredTensor) for name, value in content.items()
            ):
                raise CheckpointError(f"{path} is rejected: it contains more than a dict of tensors.")
        except CheckpointError:
            self._file.close()
            raise
        self._tensors: Mapping[str, StoredTensor] = content
        self.locations: Mapping[str, Location] = {
            name: Location(tensor.shape, tensor.dtype) for name, tensor in content.items()
        }

    def read(self, name: str, memory: Memory = FRESH) -> Tensor:
        """Reads a full tensor of any shape."""
        return self._saved.read(self._tensors[name], memory)

    def close(self) -> None:
        self._file.close()


_ZIP = b"PK"


def open_saved(file: DataFile) -> Saved:
    """Opens a file of `torch.save`.

    Raises:
        CheckpointError: naming the file and the class it names, or the damage.
    """
    return Blob(file) if file.read(0, min(file.size, len(_ZIP))) == _ZIP else Stream(file)


def read_saved(path: Path) -> Any:
    """Returns the content of a `torch.save` file without its tensors' bytes; see `open_saved`."""
    with DataFile(path) as file:
        return open_saved(file).value

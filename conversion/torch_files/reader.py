"""Opens what `torch.save` wrote, of any of its formats, without running it."""

from pathlib import Path
from typing import Any

from ...core.io.random_access_file import DataFile
from .blob import Blob
from .legacy_stream import Stream
from .torch_save import Saved

_ZIP = b"PK"


def open_saved(file: DataFile) -> Saved:
    """Opens a file of `torch.save`.

    Raises:
        CheckpointError: naming the file and the class it names, or what is damaged.
    """
    return Blob(file) if file.read(0, min(file.size, len(_ZIP))) == _ZIP else Stream(file)


def read_saved(path: Path) -> Any:
    """Reads what a file of `torch.save` holds, without its tensors' bytes; see `open_saved`."""
    with DataFile(path) as file:
        return open_saved(file).value

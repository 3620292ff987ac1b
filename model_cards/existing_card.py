"""The card of a folder that somebody else may have made: read within bounds, and from nowhere else."""

import os
from pathlib import Path

from ..core.io.safe_paths import inside, is_file
from ..core.io.untrusted_json import read_small

CARD, PICTURE = "README.md", "loss.png"
# Cards have kilobytes, pictures of losses some tens of them.
LARGEST = 16 << 20


def stored_file(directory: str | os.PathLike[str], name: str) -> bytes:
    """Returns what a folder's card, or its picture, holds; nothing where there is none.

    Raises:
        CheckpointError: it is larger than any card, no regular file, or a link that leads out of the folder.
    """
    folder = Path(directory)
    return read_small(inside(folder, name), LARGEST) if is_file(folder / name) else b""


def stored_card(directory: str | os.PathLike[str]) -> str:
    """Returns the text of a folder's card, which may be in any encoding; raises as `stored_file`."""
    return stored_file(directory, CARD).decode("utf-8", errors="replace")

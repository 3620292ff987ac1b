"""Reads JSON files from untrusted sources."""

import json
import stat
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..text import safe_repr

LARGEST_JSON = 256 << 20


def read_small(path: Path, most: int) -> bytes:
    """Reads a file of at most `most` bytes; non-regular files are rejected, as reading a pipe would block.

    Raises:
        CheckpointError: the file is larger, or not a regular file.
        OSError: it cannot be read.
    """
    file_stat = path.stat()
    if not stat.S_ISREG(file_stat.st_mode):
        raise CheckpointError(f"{path} is not a regular file.")
    if file_stat.st_size > most:
        raise CheckpointError(f"{path} has {file_stat.st_size} bytes; the limit is {most}.")
    return path.read_bytes()


def read_json_table(path: Path, most: int = LARGEST_JSON) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Args:
        most: maximum size in bytes.

    Raises:
        CheckpointError: the file cannot be read, is too large, is not JSON, or holds another type.
    """
    try:
        content = json.loads(read_small(path, most))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {safe_repr(str(error))}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains {safe_repr(content)}: expected a JSON object.")
    return content


def read_weight_map(path: Path) -> dict[str, str]:
    """Reads the `weight_map` of an index file: weight name -> file name.

    Raises:
        CheckpointError: as `read_json_table`, or the file has no such table.
    """
    weight_map = read_json_table(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path} has no table `weight_map` from weight names to file names.")
    return weight_map

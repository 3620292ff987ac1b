"""Source checkpoint: found, its format recognized, and opened under the names of its model."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..core.io.checksums import FileDigest, hash_file
from ..core.io.safe_paths import inside
from ..core.io.untrusted_json import read_json_table
from ..errors import CheckpointError
from .architecture import Architecture
from .formats import Format, format_named, open_reader, recognise
from .interfaces import Reader

# Written by a conversion next to its files: their origin and checksums.
RECORD = "conversion.json"
# Depth of a rank's folder: iteration folder, then rank folder.
_FOLDERS_DEEP = 2


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert from.

    Attributes:
        path: its folder.
        architecture: its model, from its own config or the given one.
        config_folder: folder of the config, tokenizer and the like.
        without_mtp: leave out multi-token prediction layers, if there are any.
    """

    path: Path
    format: Format
    architecture: Architecture
    config_folder: Path
    without_mtp: bool = False

    def open(self, checksums: bool, with_mtp: bool = False) -> Reader:
        """Opens its tensors under the model's names; multi-token prediction layers as in `open_reader`."""
        if checksums:
            check_record(self.path)
        load_mtp = with_mtp and not self.without_mtp
        return open_reader(self.path, self.format, self.architecture, checksums, load_mtp, self.without_mtp)


def find_source(
    source: str | os.PathLike[str], format: str | None = None, config: str | None = None, without_mtp: bool = False
) -> Source:
    """Finds a folder, or a model on the Hub, whose safetensors and JSON files are downloaded to the cache.

    Args:
        source: a folder or the id of a model.
        format: its format, recognized by default.
        config: a folder or the id of a model with the config.json, if the source has none.
        without_mtp: leave out multi-token prediction layers.

    Raises:
        CheckpointError: it is missing, of no known format, or its model is unknown.
    """
    path = local_folder(source)
    source_format = format_named(format) if format else recognise(path)
    folder = local_folder(config) if config else with_config(path)
    return Source(path, source_format, Architecture.from_folder(folder), folder, without_mtp)


def with_config(path: Path) -> Path:
    """Returns the folder that has the config.json: for an iteration folder of Megatron it may be the parent."""
    folder = path.parent if re.fullmatch(r"iter_\d{7,}|release", path.name) else path
    return folder if (folder / "config.json").is_file() and not (path / "config.json").is_file() else path


def local_folder(name: str | os.PathLike[str]) -> Path:
    """Returns an existing folder, or a model of the Hub in the cache: its safetensors, JSON and tokenizer files.

    Raises:
        CheckpointError: neither exists.
    """
    path = Path(name)
    if path.exists():
        return path
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", os.fspath(name)):
        raise CheckpointError(f"{name} does not exist.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(os.fspath(name), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name} is not a folder and cannot be loaded from the Hub: {error}") from error


def check_record(path: Path) -> None:
    """Compares the files of a converted checkpoint, or of a folder in one, with their recorded checksums.

    Raises:
        CheckpointError: naming missing or changed files.
    """
    path = path.resolve()
    holder = next((folder for folder in (path, *path.parents[:_FOLDERS_DEEP]) if (folder / RECORD).is_file()), None)
    if holder is None:
        return
    record, inner = holder / RECORD, path.relative_to(holder)
    try:
        files = {name: FileDigest(**entry) for name, entry in read_json_table(record)["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{record} cannot be read: {error}") from error
    file_names = [name for name in files if Path(name).is_relative_to(inner)]
    wrong = [
        name for name in file_names if not inside(holder, name).is_file() or hash_file(holder / name) != files[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{holder}: {', '.join(wrong[:5])} are missing or have changed since they were written. If this is "
            f"intended, delete {RECORD} or skip the checksums."
        )

"""Registry of checkpoint formats. To add one, create a folder with a `FORMAT` and add it here."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import CheckpointError, ConfigError
from .architecture import Architecture, OwnWeights
from .dcp.format import FORMAT as DCP
from .format import Format
from .hugging_face.format import FORMAT as HF
from .interfaces import Reader, TargetOptions
from .megatron.folder import TRACKER, iteration_folder
from .megatron_core.format import FORMAT as MEGATRON_CORE
from .megatron_legacy.format import FORMAT as MEGATRON_LEGACY
from .mtp_layers import count_mtp_layers, include_mtp
from .sharded.format import FORMAT as SHARDED
from .shards.format import FORMAT as SHARDS

# Order in which a folder is matched against the formats.
FORMATS: Mapping[str, Format] = MappingProxyType(
    {format.name: format for format in (MEGATRON_CORE, MEGATRON_LEGACY, HF, SHARDED, DCP, SHARDS)}
)


def format_named(name: str) -> Format:
    """Finds a format by its name or alias.

    Raises:
        ConfigError: naming the known formats.
    """
    for format in FORMATS.values():
        if name and name in (format.name, format.alias):
            return format
    known = [*FORMATS, *(format.alias for format in FORMATS.values() if format.alias)]
    raise ConfigError(f"format={name!r}: expected one of {', '.join(known)}.")


def is_known(path: Path) -> bool:
    """Returns whether a folder has the files of some format other than Hugging Face's; it may be damaged."""
    if not path.is_dir():
        return False
    if (path / TRACKER).is_file():
        return True
    try:
        return recognise(path) is not HF
    except CheckpointError:
        return False


def check_options(format: Format, options: TargetOptions) -> None:
    """Checks that a format supports the given options.

    Raises:
        ConfigError: naming an option that would have no effect, and the options of the format.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in format.options:
            known = ", ".join(sorted(format.options)) or "none"
            raise ConfigError(f"{field.name}={value!r} has no effect on {format.name}. Its options: {known}.")


def recognise(path: Path) -> Format:
    """Finds the format of a folder.

    Raises:
        CheckpointError: the folder matches no known format; lists what each format looks for.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    folder = iteration_folder(path)
    names = os.listdir(folder)
    for format in FORMATS.values():
        if format.recognise(folder, names):
            return format
    marks = ", ".join(f"{format.marks} ({format.name})" for format in FORMATS.values())
    raise CheckpointError(
        f"{path} is not a checkpoint of a known format: it has no {marks}. Pass the folder that holds these files."
    )


def open_reader(
    path: Path,
    format: Format,
    architecture: Architecture,
    verify: bool = True,
    with_mtp: bool = False,
    without_mtp: bool = False,
) -> Reader:
    """Opens a checkpoint of any format as tensors of the model.

    Args:
        verify: compare the format's own checksums.
        with_mtp: include multi-token prediction layers, if there are any and transformers supports them.
        without_mtp: leave out multi-token prediction layers, if there are any.

    Raises:
        CheckpointError: the checkpoint is damaged or unsafe, does not fit this model and config, or has multi-token
            prediction layers and `without_mtp` is not set.
    """
    try:
        reader = format.open(path, architecture, verify)
    except OwnWeights as error:
        architecture = architecture.with_own_weights(error.names)
        reader = format.open(path, architecture, False)
    try:
        count = count_mtp_layers(reader.left_out, architecture.config) if with_mtp else 0
        extended = include_mtp(architecture, count) if count else None
        if extended is not None:
            reader.close()
            architecture, reader = extended, format.open(path, extended, False)
        reader.architecture = architecture
        architecture.check_entries(reader.entries, str(path))
        if format.megatron and reader.left_out and not without_mtp:
            raise CheckpointError(
                f"{path} has {len(reader.left_out)} tensors of multi-token prediction ({reader.left_out[0]}, ...), "
                f"which {type(architecture.model).__name__} does not have. Use `hf-megatron convert --without-mtp` "
                "(`without_mtp=True`) to leave them out."
            )
    except CheckpointError:
        reader.close()
        raise
    return reader

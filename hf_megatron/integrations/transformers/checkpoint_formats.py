"""`from_pretrained` for checkpoints that are not Hugging Face folders, and `save_pretrained(format=...)`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from ...checkpoint.strict_loading import check_weight_index
from ...checkpoint.untrusted_config import LARGEST_CONFIG
from ...config import MegatronConfig
from ...core.communication.rank_errors import gather, propagate_errors, rank_and_size
from ...core.io.safe_paths import inside, is_file
from ...core.io.safetensors import read_header
from ...core.io.untrusted_json import read_json_table
from ...errors import CheckpointError
from ..accelerate.process_group import ensure_process_group
from ..hub.hooks import readable_part

if TYPE_CHECKING:
    from ...conversion.interfaces import TargetOptions
    from ...conversion.source import Source

_GENERATION = "generation_config.json"


def other_source(model_class: Any, path: Any, config: Any, layout: MegatronConfig) -> "Source | None":
    """Opens a folder in a format other than Hugging Face's; returns `None` for everything that upstream reads.

    Without a `config` the folder's `config.json` describes the model.

    Raises:
        CheckpointError: on every rank; the folder is damaged, has no config, or differs between ranks.
    """
    if path is None:
        return None
    if layout.is_parallel:
        # The collectives below need the process group.
        ensure_process_group(layout.timeout)
    source_format = None
    with propagate_errors(f"Opening {path}"):
        if os.path.isdir(path):
            # Imported lazily: most loads need no converter.
            from ...conversion.formats import HF, is_known, recognise

            source_format = recognise(Path(path)) if is_known(Path(path)) else HF
    names = gather("absent" if source_format is None else source_format.name, None, f"Opening {path}")
    if len(set(names)) > 1:
        listing = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise CheckpointError(f"{path} differs between ranks ({listing}).")
    if source_format is None or source_format.name == "hf":
        return None
    from ...conversion.architecture import Architecture
    from ...conversion.source import Source, with_config

    folder = Path(path)
    with propagate_errors(f"Opening {path}"):
        model_config = Architecture.from_folder(with_config(folder)).config if config is None else config
        source = Source(folder, source_format, Architecture.from_class(model_class, model_config), with_config(folder))
    return source


@dataclass(frozen=True)
class Opened:
    """Checkpoint source and arguments to pass to the stock `from_pretrained`.

    Attributes:
        path: path to load from; `None` if the weights are in `arguments`.
        arguments: arguments that override the caller's.
        folder (`Path`, *optional*): folder of a checkpoint that upstream cannot read.
    """

    path: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    def complete(self, model: Any) -> None:
        """Loads the generation config, which upstream would read from the model folder that it was not given."""
        if self.folder is None or not model.can_generate() or not is_file(self.folder / _GENERATION):
            return
        # The stock reader has no size limit, so check the file first.
        read_json_table(inside(self.folder, _GENERATION), LARGEST_CONFIG)
        model.generation_config = GenerationConfig.from_pretrained(self.folder)


@contextmanager
def opened(model_class: Any, path: Any, kwargs: dict[str, Any], layout: MegatronConfig) -> Iterator[Opened]:
    """Opens a checkpoint of any format for the stock `from_pretrained` with the caller's `kwargs`.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged or does not fit the model.
    """
    source = other_source(model_class, path, kwargs.get("config"), layout)
    if source is not None:
        with reading(source, layout, kwargs.pop("dtype", kwargs.pop("torch_dtype", None))) as arguments:
            yield Opened(None, arguments, source.config_folder)
    elif path is None or not layout.is_parallel:
        yield Opened(path)
    else:
        check_weight_index(path)
        with propagate_errors(f"Opening {path}"):
            _check_pickles(path)
        try:
            yield Opened(readable_part(path))
        except SafetensorError as error:
            raise CheckpointError(f"{_damage(path)} ({error})") from error


def _check_pickles(path: Any) -> None:
    """Validates the pickles that upstream would load with the size limits of the converters: torch has none."""
    if not os.path.isdir(path) or any(Path(path).glob("model*.safetensors")):
        return
    from ...conversion.torch_files.weight_file import read_saved

    for file in sorted(Path(path).glob("pytorch_model*.bin")):
        read_saved(file)


def _damage(path: Any) -> str:
    """Returns an error message naming the unreadable file of a folder and the reason."""
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            read_header(file)
        except CheckpointError as error:
            return str(error).removesuffix(".")
    return f"A weight file of {path} cannot be read"


@contextmanager
def reading(source: "Source", config: MegatronConfig, dtype: Any) -> Iterator[dict[str, Any]]:
    """Yields arguments with which the stock `from_pretrained` reads a checkpoint through a converter.

    Each rank reads full tensors of its own pipeline stages, one at a time, and keeps its local shard. For `dtype`
    `None` or `"auto"` the dtype of the config is used, or else the checkpoint's.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged or does not fit the model.
    """
    from ...conversion.lazy_tensors import lazy_weights

    with propagate_errors(f"Opening {source.path}"):
        # Only the first rank verifies checksums.
        reader = source.open(checksums=config.verify_checksums and rank_and_size(None)[0] == 0)
    with reader:
        model_config = source.architecture.config
        if dtype in (None, "auto"):
            floating = (entry.dtype for entry in reader.entries.values() if entry.dtype.is_floating_point)
            dtype = model_config.dtype or next(floating, torch.get_default_dtype())
        yield {"config": model_config, "state_dict": lazy_weights(reader), "dtype": dtype}


def save_in_format(
    model: Any, original: Callable, save_directory: Any, format: str, options: "TargetOptions | None", **kwargs: Any
) -> None:
    """Implements `save_pretrained(directory, format="megatron_core", options=...)`; a collective call.

    Raises:
        CheckpointError: on every rank, naming the rank that failed; no files are left in that case.
        TypeError: for arguments that only the Hugging Face format has.
    """
    from ...conversion.export import export

    if kwargs:
        raise TypeError(f"save_pretrained(format={format!r}) takes options=, but not {', '.join(sorted(kwargs))}.")

    def write_config(folder: Path) -> None:
        original(model, folder, state_dict={})
        # Upstream writes an empty weight file for an empty state dict.
        for path in folder.glob("*.safetensors"):
            path.unlink()

    export(model, Path(save_directory), format, options, write_config)

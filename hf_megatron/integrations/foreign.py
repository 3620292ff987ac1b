"""`from_pretrained` of checkpoints that are no Hugging Face folders, and `save_pretrained(format=...)`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.together import agreed, rank_and_size
from ..config import MegatronConfig
from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..conversion.source import Source
    from ..conversion.tensors import Layout


def foreign_source(model_class: Any, path: Any, config: Any) -> "Source | None":
    """A folder in another layout than Hugging Face's; `None` for everything that stock reads.

    Args:
        config: the model's, of the folder's `config.json` by default.
    """
    if path is None or not os.path.isdir(path):
        return None
    # Most loads need none of the converters.
    from ..conversion.architecture import Architecture
    from ..conversion.formats import HF, recognise
    from ..conversion.source import Source, with_config

    folder = Path(path)
    try:
        found = recognise(folder)
    except CheckpointError:
        # Stock says what it looks for.
        return None
    if found is HF:
        return None
    if config is None:
        config = Architecture.from_folder(with_config(folder)).config
    return Source(folder, found, Architecture.from_class(model_class, config), with_config(folder))


@contextmanager
def reading(source: "Source", config: MegatronConfig) -> Iterator[dict[str, Any]]:
    """Arguments for stock `from_pretrained` with which it reads a checkpoint through a converter.

    Each rank reads whole tensors of the stages it holds, one at a time, and keeps its part of them.

    Raises:
        CheckpointError: on every rank; the checkpoint is damaged or does not fit the model.
    """
    from ..conversion.lazy import lazy_weights

    with agreed(f"Opening {source.path}"):
        # One rank compares the checksums for all.
        reader = source.open(checksums=config.verify_checksums and rank_and_size(None)[0] == 0)
    with reader:
        own = source.architecture.config
        floating = (entry.dtype for entry in reader.entries.values() if entry.dtype.is_floating_point)
        dtype = own.dtype or next(floating, torch.get_default_dtype())
        yield {"config": own, "state_dict": lazy_weights(reader), "dtype": dtype}


def save_in_format(
    model: Any, original: Callable, save_directory: Any, format: str, layout: "Layout | None", **kwargs: Any
) -> None:
    """`save_pretrained(directory, format="megatron_core", layout=Layout(tp_size=8))`; every rank calls it.

    Raises:
        CheckpointError: on every rank, naming the rank that failed; nothing is left behind then.
        TypeError: arguments of the stock format.
    """
    from ..conversion.export import export

    if kwargs:
        raise TypeError(f"save_pretrained(format={format!r}) takes layout= and no {', '.join(sorted(kwargs))}.")

    def write_config(folder: Path) -> None:
        original(model, folder, state_dict={})
        # Stock writes an empty weight file for an empty state dict.
        for path in folder.glob("*.safetensors"):
            path.unlink()

    export(model, Path(save_directory), format, layout, write_config)

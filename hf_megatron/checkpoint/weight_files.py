"""Weights in Hugging Face format: one safetensors file or several with an index, streamed tensor by tensor."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import get_torch_storage_size, split_state_dict_into_shards_factory
from torch import Tensor

from ..core.io.checksums import NewFile
from ..core.io.safetensors import SafetensorsWriter, TensorMeta, widest_first


class WeightFile:
    """Safetensors file that gets its final name when it is complete; tensors may be written in any order."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]):
        self._path = path
        temporary = path.with_name(f"{path.name}.tmp")
        # Left by a save that was killed.
        temporary.unlink(missing_ok=True)
        self._file = NewFile(temporary, hashed=False)
        # Ordered by dtype size and name, like the safetensors package.
        planned = widest_first({name: TensorMeta.of(tensors[name]) for name in sorted(tensors)})
        self._writer = SafetensorsWriter(self._file, planned)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor of the planned shape."""
        self._writer.write(name, tensor)

    def close(self, *, complete: bool) -> None:
        """Renames the file to its final name, or removes it."""
        try:
            if complete:
                self._writer.finish()
                # No fsync, like stock `save_pretrained`.
                self._file.close(durable=False)
                os.replace(self._file.path, self._path)
        finally:
            self._file.discard()
            self._file.path.unlink(missing_ok=True)


def write_weights(
    directory: str,
    planned: Mapping[str, Tensor],
    streamed: Iterable[Mapping[str, Tensor]],
    *,
    max_shard_size: int | str,
    parameters: int,
    variant: str | None = None,
) -> None:
    """Writes the planned tensors of any shape, which may arrive in any order, under transformers' file names.

    The next group of tensors is produced while the last one is written, so two groups are in memory at a time.

    Args:
        planned: name -> a meta tensor of the shape and dtype to come.
        streamed: groups of tensors, each tensor once.
        parameters: number of entries in the model's parameters, for the index.

    Raises:
        CheckpointError: a streamed tensor is not as planned; no file gets its final name then.
    """
    base = "model" if variant is None else f"model.{variant}"
    pattern = f"{base}{{suffix}}.safetensors"
    split = split_state_dict_into_shards_factory(
        dict(planned),
        filename_pattern=pattern,
        max_shard_size=max_shard_size,
        get_storage_size=get_torch_storage_size,
        # Weights that stock splits from one tensor, such as experts', are stored in one file. The default function for
        # torch tensors does not detect shared storage on the meta device.
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
    )
    writers: dict[str, WeightFile] = {}

    def write(tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            writers[split.tensor_to_filename[name]].write(name, tensor)

    complete = False
    try:
        for filename, names in split.filename_to_tensors.items():
            writers[filename] = WeightFile(Path(directory, filename), {name: planned[name] for name in names})
        with ThreadPoolExecutor(1) as thread:
            pending: Future[None] | None = None
            for tensors in streamed:
                if pending is not None:
                    pending.result()
                pending = thread.submit(write, tensors)
            if pending is not None:
                pending.result()
        complete = True
    finally:
        for writer in writers.values():
            writer.close(complete=complete)
    _remove_stale(directory, base, set(split.filename_to_tensors))
    index = Path(directory, "model.safetensors.index" + ("" if variant is None else f".{variant}") + ".json")
    if split.is_sharded:
        content = {
            "metadata": {"total_parameters": parameters, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        index.unlink(missing_ok=True)


def _remove_stale(directory: str, base: str, written: set[str]) -> None:
    """Removes weight files of an earlier save that this one does not replace; they would be loaded as well."""
    stale = re.compile(rf"{re.escape(base)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for filename in os.listdir(directory):
        if stale.fullmatch(filename) and filename not in written:
            os.remove(os.path.join(directory, filename))

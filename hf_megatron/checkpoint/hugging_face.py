"""Weights as Hugging Face writes them: one safetensors file or several with an index, streamed tensor by tensor."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ..errors import UnsupportedError
from .shards import DTYPES


class SafetensorsWriter:
    """Writes one safetensors file tensor by tensor; names, shapes and dtypes are known beforehand.

    The `safetensors` package writes a file from one dictionary that holds all of it.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]):
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        # Widest dtype first, as the safetensors package orders them, keeps every tensor aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = header
        self.start = 8 + len(encoded)
        self.missing = set(tensors)
        self.path = path
        self.file: IO[bytes] = open(path + ".tmp", "wb")  # noqa: SIM115
        self.file.write(len(encoded).to_bytes(8, "little"))
        self.file.write(encoded)
        self.file.truncate(self.start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        entry = self.header[name]
        if list(tensor.shape) != entry["shape"] or DTYPES[tensor.dtype] != entry["dtype"]:
            raise UnsupportedError(f"{name}: planned {entry}, got {tuple(tensor.shape)} {tensor.dtype}.")
        self.file.seek(self.start + entry["data_offsets"][0])
        data = tensor.contiguous()
        self.file.write(data.view(-1).view(torch.uint8).numpy().data)
        self.missing.discard(name)

    def close(self, *, complete: bool) -> None:
        self.file.close()
        if not complete or self.missing:
            os.remove(self.path + ".tmp")
            if complete:
                raise UnsupportedError(f"{self.path}: {sorted(self.missing)} were planned and never written.")
            return
        os.replace(self.path + ".tmp", self.path)


def write_weights(
    directory: str,
    planned: Mapping[str, Tensor],
    streamed: Iterable[Mapping[str, Tensor]],
    *,
    max_shard_size: int | str,
    variant: str | None = None,
) -> None:
    """Writes the planned tensors, which arrive in any order, under transformers' file names.

    The next tensors are made while the last ones are written, so two groups of them are in memory at a time.

    Args:
        planned: name -> a meta tensor of the shape and dtype to come.
        streamed: groups of tensors, each tensor once.
        max_shard_size, variant: as in `PreTrainedModel.save_pretrained`.

    Raises:
        UnsupportedError: what arrives is not what was planned; no file is left then.
    """
    base = "model" if variant is None else f"model.{variant}"
    pattern = f"{base}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(dict(planned), filename_pattern=pattern, max_shard_size=max_shard_size)
    writers: dict[str, SafetensorsWriter] = {}
    complete = False
    try:
        for filename, names in split.filename_to_tensors.items():
            path = os.path.join(directory, filename)
            writers[filename] = SafetensorsWriter(path, {name: planned[name] for name in names}, {"format": "pt"})
        with ThreadPoolExecutor(1) as thread:
            pending: Future[None] | None = None
            for tensors in streamed:
                if pending is not None:
                    pending.result()
                pending = thread.submit(_write, writers, split.tensor_to_filename, tensors)
            if pending is not None:
                pending.result()
        complete = True
    finally:
        for writer in writers.values():
            writer.close(complete=complete)
    _remove_stale(directory, base, set(split.filename_to_tensors))
    index = os.path.join(
        directory, f"{base}.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json"
    )
    if split.is_sharded:
        total = sum(tensor.numel() for tensor in planned.values())
        content = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": split.tensor_to_filename}
        with open(index, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
    elif os.path.exists(index):
        os.remove(index)


def _write(writers: Mapping[str, SafetensorsWriter], files: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        writers[files[name]].write(name, tensor)


def _remove_stale(directory: str, base: str, written: set[str]) -> None:
    """Weight files of an earlier save that this one does not replace would be read beside the new ones."""
    stale = re.compile(rf"{re.escape(base)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for filename in os.listdir(directory):
        if stale.fullmatch(filename) and filename not in written:
            os.remove(os.path.join(directory, filename))

"""Hugging Face folders: `config.json` and safetensors (or `.bin` files) under the names of the model's files.

Files and memory differ in names and shapes (experts that are packed in memory, prefixes, renamed modules);
transformers' own conversions lead from one to the other, in both directions.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ..checkpoint.load import check_weight_index
from ..checkpoint.manifest import inside
from ..errors import CheckpointError
from ..upstream import LoadingGroup, conversion_groups, convert_loaded, loading_groups, revert_conversion
from .architecture import Architecture
from .output import Output
from .pickled_file import PickledFile
from .safetensors_file import SafetensorsFile, SafetensorsStream
from .tensors import WEIGHT, Entry, Key, Layout, Reader, Writer, same_bytes

# Tokenizers have tens of megabytes.
LARGEST_SMALL_FILE = 256 << 20
INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)")


def weight_files(path: Path) -> list[str]:
    """The weight files of a folder: those of its index, else the single one; safetensors before `.bin`.

    Raises:
        CheckpointError: there are none, an index is unreadable, or names files outside of the folder.
    """
    check_weight_index(path)
    for kind in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{kind}.index.json"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index} cannot be read: {error}") from error
            missing = [name for name in names if not (path / name).is_file()]
            if missing:
                raise CheckpointError(f"{path}: {', '.join(missing[:5])} of {index.name} are missing.")
            return names
        if (path / kind).is_file():
            return [kind]
    raise CheckpointError(f"{path} has no model.safetensors, no pytorch_model.bin and no index of several.")


class HuggingFaceReader(Reader):
    """A folder that `from_pretrained` reads.

    Raises:
        CheckpointError: files are missing or damaged, or hold other weights than the architecture has.
    """

    def __init__(self, path: Path, architecture: Architecture):
        self.path, self.architecture = path, architecture
        self._files: list[SafetensorsFile | PickledFile] = []
        found: dict[str, SafetensorsFile | PickledFile] = {}
        for name in weight_files(path):
            file = inside(path, name)
            opened = SafetensorsFile(file) if name.endswith(".safetensors") else PickledFile(file)
            self._files.append(opened)
            found |= dict.fromkeys(opened.spans, opened)
        self._found = found
        groups, surplus = loading_groups(architecture.model, found)
        self._group_of: dict[Key, LoadingGroup] = {}
        entries: dict[Key, Entry] = {}
        self._copies: dict[Key, list[LoadingGroup]] = {}
        for group in groups:
            meta = {name: self._meta(name) for name, _ in group.sources}
            try:
                converted = convert_loaded(architecture.model, group, meta)
            except (RuntimeError, ValueError, TypeError) as error:
                names = ", ".join(name for name, _ in group.sources[:3])
                raise CheckpointError(f"{path}: {names} cannot be converted for {group.target}: {error}") from error
            for name, tensor in converted.items():
                key = Key(WEIGHT, architecture.first_name(name))
                if key in entries:
                    self._copies.setdefault(key, []).append(group)
                else:
                    entries[key], self._group_of[key] = Entry.of(tensor), group
        architecture.check([*(key.name for key in entries), *surplus], str(path))
        saved = [key for key in entries if key.name in architecture.saved_names]
        self.entries = {key: entries[key] for key in sorted(saved, key=architecture.sort_key)}
        self._ready: dict[Key, Tensor] = {}

    def _meta(self, name: str) -> Tensor:
        span = self._found[name].spans[name]
        return torch.empty(span.shape, dtype=span.dtype, device="meta")

    def read(self, key: Key) -> Tensor:
        if key not in self._ready:
            self._ready |= self._converted(self._group_of[key])
        tensor = self._ready.pop(key)
        for group in self._copies.get(key, ()):
            if not same_bytes(tensor, self._converted(group)[key]):
                names = ", ".join(name for name, _ in (*self._group_of[key].sources, *group.sources))
                raise CheckpointError(f"{self.path}: {names} are one tied weight of the model, and differ.")
        return tensor

    def _converted(self, group: LoadingGroup) -> dict[Key, Tensor]:
        tensors = {name: self._found[name].read(name, self.memory) for name, _ in group.sources}
        converted = convert_loaded(self.architecture.model, group, tensors)
        return {Key(WEIGHT, self.architecture.first_name(name)): tensor for name, tensor in converted.items()}

    def close(self) -> None:
        for file in self._files:
            file.close()


class HuggingFaceWriter(Writer):
    """Writes the weights of a folder, in files of at most `layout.max_shard_size`."""

    def __init__(self, output: Output, plan: Mapping[Key, Entry], architecture: Architecture, layout: Layout):
        self.plan, self.architecture = plan, architecture
        self._names = architecture.saved_names
        first = {saved: name for name, saved in self._names.items()}
        groups = conversion_groups(architecture.model, [self._names[key.name] for key in plan])
        self._group_of = {first[name]: tuple(first[other] for other in group) for group in groups for name in group}
        self._waiting: dict[str, Tensor] = {}
        files = self._planned_files()
        split = split_torch_state_dict_into_shards(
            {name: entry.meta() for name, entry in files.items()},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=layout.max_shard_size,
        )
        self._streams = {
            name: SafetensorsStream(output.create(name), {tensor: files[tensor] for tensor in tensors})
            for name, tensors in split.filename_to_tensors.items()
        }
        self._file_of = split.tensor_to_filename
        if split.is_sharded:
            total = sum(torch.Size(entry.shape).numel() for entry in files.values())
            content = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": self._file_of}
            output.add(INDEX, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _planned_files(self) -> dict[str, Entry]:
        """What the files will hold, in the order in which it will come."""
        files: dict[str, Entry] = {}
        waiting: dict[str, Tensor] = {}
        for key, entry in self.plan.items():
            waiting[key.name] = entry.meta()
            files |= {name: Entry.of(tensor) for name, tensor in self._complete(key.name, waiting).items()}
        if waiting:
            raise CheckpointError(f"{', '.join(waiting)} lie in one tensor of the file with others that are not there.")
        return files

    def _complete(self, name: str, waiting: dict[str, Tensor]) -> dict[str, Tensor]:
        """The file's tensors of a group, once all of it is there."""
        group = self._group_of[name]
        if any(other not in waiting for other in group):
            return {}
        return revert_conversion(self.architecture.model, {self._names[other]: waiting.pop(other) for other in group})

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check(key, tensor)
        self._waiting[key.name] = tensor
        for name, converted in self._complete(key.name, self._waiting).items():
            self._streams[self._file_of[name]].write(name, converted)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.finish()


def copy_small_files(source: Path, output: Output) -> list[str]:
    """Config, tokenizer and the like: every plain file that holds no weights and belongs to no training run.

    Raises:
        CheckpointError: a link leads out of the folder, or a file is large.
    """
    copied = []
    for path in sorted(source.iterdir()):
        if path.is_file() and _is_small(path.name):
            if inside(source, path.name).stat().st_size > LARGEST_SMALL_FILE:
                raise CheckpointError(f"{path} is neither weights nor a small file: move it out of the folder.")
            output.add(path.name, path.read_bytes())
            copied.append(path.name)
    return copied


_OTHERS = re.compile(
    r"\..*|shard-.*|random-.*|data-.*|loop\..*|trainer_state\..*|training_args\..*|manifest\.json|conversion\.json"
    r"|metadata\.json|latest|latest_checkpointed_iteration\.txt|README\.md|loss\.png|optimizer.*|scheduler.*|scaler.*|rng_state.*|.*\.index(\..*)?\.json"
    r"|.*\.(safetensors|bin|pt|pth|pkl|ckpt|distcp|h5|msgpack|gguf|onnx|tmp)"
)


def _is_small(name: str) -> bool:
    return not _OTHERS.fullmatch(name)

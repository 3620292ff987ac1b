"""Reader of Hugging Face folders: `config.json` and safetensors (or `.bin`) under the names of the model's files.

Names and shapes differ between files and memory (experts packed in memory, prefixes, renamed modules); transformers'
own weight conversions map one to the other, in both directions.
"""

import re
from pathlib import Path

from torch import Tensor

from ...checkpoint.strict_loading import check_weight_index
from ...compat.transformers_loading import LoadingGroup, convert_loaded, loading_groups
from ...core.io.safe_paths import inside, is_file
from ...core.io.safetensors import SafetensorsFile, TensorMeta
from ...core.io.untrusted_json import read_weight_map
from ...errors import CheckpointError
from ..architecture import Architecture, OwnWeights
from ..interfaces import WEIGHT, Key, Reader, same_bytes
from ..mtp_layers import mtp_weight_names, repeated_names
from ..torch_files.weight_file import PickledFile

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)")

# Released files number MTP layers after the decoder layers, or name them `mtp`.
_FURTHER = re.compile(r"(?:^|\.)(?:mtp\b|mtp_\w*\.|layers\.(?P<layer>\d{1,9})\.)")


def _is_mtp_name(name: str, layers: int | None) -> bool:
    match = _FURTHER.search(name)
    if match is None or match["layer"] is None:
        return match is not None
    return layers is not None and int(match["layer"]) >= layers


def weight_files(path: Path) -> list[str]:
    """Lists the weight files of a folder: the files of its index and the single one; safetensors before `.bin`.

    If an index and a single file are both present, loaders disagree on which to use, so their weights must be equal.

    Raises:
        CheckpointError: there are none, an index is unreadable, or it names files outside the folder.
    """
    check_weight_index(path)
    for kind in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{kind}.index.json"
        if is_file(index):
            names = sorted(set(read_weight_map(index).values()))
            missing = [name for name in names if not inside(path, name).is_file()]
            if missing:
                raise CheckpointError(f"{path}: {', '.join(missing[:5])}, listed in {index.name}, are missing.")
            return sorted({*names, kind} if (path / kind).is_file() else names)
        if is_file(path / kind):
            return [kind]
    raise CheckpointError(f"{path} has no model.safetensors, no pytorch_model.bin and no index of weight files.")


class HuggingFaceReader(Reader):
    """A folder that `from_pretrained` can read.

    Raises:
        CheckpointError: files are missing or damaged, or their weights are not the weights of the architecture.
    """

    def __init__(self, path: Path, architecture: Architecture):
        self.path, self.architecture = path, architecture
        self._files: list[SafetensorsFile | PickledFile] = []
        # A weight has several holders if files repeat it.
        self._holders: dict[str, list[SafetensorsFile | PickledFile]] = {}
        for name in weight_files(path):
            file = inside(path, name)
            opened = SafetensorsFile(file) if name.endswith(".safetensors") else PickledFile(file)
            self._files.append(opened)
            for weight, location in opened.locations.items():
                holders = self._holders.setdefault(weight, [])
                first = holders[0].locations[weight] if holders else location
                if (first.shape, first.dtype) != (location.shape, location.dtype):
                    raise CheckpointError(
                        f"{path}: {_both(holders[0], opened)} both have {weight}, but with different shapes or dtypes."
                    )
                holders.append(opened)
        repeated = repeated_names(self._holders, architecture)
        groups, surplus = loading_groups(architecture.model, [name for name in self._holders if name not in repeated])
        further = mtp_weight_names(self._holders, architecture.config)
        self._group_of: dict[Key, LoadingGroup] = {}
        entries: dict[Key, TensorMeta] = {}
        self._copies: dict[Key, list[LoadingGroup]] = {}
        for group in groups:
            meta = {name: self._holders[name][0].locations[name].meta() for name, _ in group.sources}
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
                    entries[key], self._group_of[key] = TensorMeta.of(tensor), group
        surplus = [name for name in surplus if name not in further]
        architecture.check([*(key.name for key in entries), *surplus], str(path))
        self._check_tied()
        used = {name for group in groups for name, _ in group.sources}
        # Other unused tensors are buffers of old releases, which are safe to ignore.
        layers = getattr(architecture.config.get_text_config(), "num_hidden_layers", None)
        unused = [name for name in self._holders if name not in used and name not in repeated]
        self.left_out = tuple(name for name in unused if name in further or _is_mtp_name(name, layers))
        self._repeats: dict[Key, list[str]] = {}
        for name, target_name in repeated.items():
            self._repeats.setdefault(Key(WEIGHT, architecture.first_name(target_name)), []).append(name)
        if repeated:
            self.notes = (
                f"{', '.join(repeated)} are left out: they duplicate weights that multi-token prediction shares with "
                "the model",
            )
        saved = [key for key in entries if key.name in architecture.saved_names]
        self.entries = {key: entries[key] for key in sorted(saved, key=architecture.sort_key)}
        self._ready: dict[Key, Tensor] = {}

    def _check_tied(self) -> None:
        """Checks that weights tied by every config of the class are equal in the files, which may store both.

        Raises:
            OwnWeights: they differ, as in T5 1.1, where transformers does not tie them either.
        """
        different = []
        for key, copies in self._copies.items() if self.architecture.ties_always else ():
            groups = {group.target: group for group in (self._group_of[key], *copies)}
            first = self._converted(groups.pop(key.name, self._group_of[key]))[key]
            different += [name for name, group in groups.items() if not same_bytes(first, self._converted(group)[key])]
        if different:
            self.close()
            raise OwnWeights(str(self.path), different)

    def read(self, key: Key) -> Tensor:
        if key not in self._ready:
            self._ready |= self._converted(self._group_of[key])
        tensor = self._ready.pop(key)
        for group in self._copies.get(key, ()):
            if not same_bytes(tensor, self._converted(group)[key]):
                names = ", ".join(name for name, _ in (*self._group_of[key].sources, *group.sources))
                raise CheckpointError(f"{self.path}: {names} are tied in the model but differ.")
        for name in self._repeats.get(key, ()):
            if not same_bytes(tensor, self._stored(name)):
                raise CheckpointError(f"{self.path}: {name} differs from {key.name}, although the model shares them.")
        return tensor

    def _converted(self, group: LoadingGroup) -> dict[Key, Tensor]:
        tensors = {name: self._stored(name) for name, _ in group.sources}
        converted = convert_loaded(self.architecture.model, group, tensors)
        return {Key(WEIGHT, self.architecture.first_name(name)): tensor for name, tensor in converted.items()}

    def _stored(self, name: str) -> Tensor:
        first, *others = self._holders[name]
        tensor = first.read(name, self.memory)
        for other in others:
            if not same_bytes(tensor, other.read(name, self.memory)):
                raise CheckpointError(f"{self.path}: {_both(first, other)} both have {name}, but they differ.")
        return tensor

    def close(self) -> None:
        for file in self._files:
            file.close()


def _both(one: SafetensorsFile | PickledFile, other: SafetensorsFile | PickledFile) -> str:
    return f"{one.path.name} and {other.path.name}"

"""Reader of torch distributed checkpoints under the model's names in memory.

Supported are folders written by `torch.distributed.checkpoint.save`, by Accelerate (`pytorch_model_fsdp_0` and
`optimizer_0`), and by transformers (`shard-*.safetensors`). Moments have the keys of `get_optimizer_state_dict`,
flattened or not: `optimizer.state.{name}.exp_avg`.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.io.safetensors import MOST_TENSORS, TensorMeta
from ...errors import CheckpointError
from ..chunks import ChunkedTensors
from ..interfaces import MOMENTS, WEIGHT, Key, OptimizerState, Reader, same_bytes
from ..shards.reader import ShardFolder, is_shard_folder
from ..torch_files.torch_save import StoredTensor
from .store_reader import METADATA, StoreReader

# Keys of optimizer state, with or without outer keys as prefix; also matches other optimizers' state, to reject it.
_STATE = re.compile(r"(?:(?:.*\.)?(?:optimizer|optim)\w*\.)?state\.(?P<name>.+)\.(?P<kind>[a-z_]+)")
_GROUP = re.compile(r"(?:(?:.*\.)?(?:optimizer|optim)\w*\.)?param_groups\.(?P<group>.+)\.(?P<setting>[a-z_]+)")
_ADAM = (*MOMENTS, "step")


class DcpReader(Reader):
    """A distributed checkpoint of torch.

    Args:
        names: the weights it should have. If `None`, every tensor not recognized as optimizer state is a weight.
        first_name: maps any name of a tied weight to the one in `names`; such a weight may be stored several times.
        most: maximum number of tensors in a store.

    Raises:
        CheckpointError: naming a damaged or unsafe file, or tensors that are missing or unexpected.
    """

    def __init__(
        self,
        path: Path,
        names: Collection[str] | None = None,
        first_name: Callable[[str], str] = lambda name: name,
        most: int = MOST_TENSORS,
    ):
        self.path = path
        self._names = None if names is None else dict.fromkeys(names)
        self._first_name = first_name
        stores = list(_stores(path, most))
        self._sources: dict[Key, list[tuple[ChunkedTensors, str]]] = {}
        steps: list[tuple[ChunkedTensors, str]] = []
        others: list[str] = []
        for store in stores:
            prefix = self._prefix(store)
            for stored in store.entries:
                key = self._key(store, stored, prefix)
                if key is not None and key.kind == "step" and store.entries[stored].numel == 1:
                    steps.append((store, stored))
                elif key is not None and key.kind in (WEIGHT, *MOMENTS):
                    self._sources.setdefault(key, []).append((store, stored))
                elif key is not None:
                    others.append(key.kind)
        missing = [name for name in self._names or () if Key(WEIGHT, name) not in self._sources]
        if missing:
            raise CheckpointError(f"{path}: {len(missing)} weights are missing, among them {missing[:5]}.")
        self.entries = {key: _same(path, sources) for key, sources in self._ordered()}
        moments = [key for key in self.entries if key.kind != WEIGHT]
        self.optimizer_unsupported_reason = self._optimizer_unsupported_reason(others, moments, steps)
        if self.optimizer_unsupported_reason is not None:
            self.entries = {key: entry for key, entry in self.entries.items() if key.kind == WEIGHT}
        elif moments:
            step = max(int(store.read(name).item()) for store, name in steps)
            groups = [group for store in stores if isinstance(store, StoreReader) for group in _groups(store)]
            self.optimizer, self.iteration = OptimizerState(step, tuple(groups)), step

    def different_copies(self) -> Iterator[str]:
        """Yields second names of weights that the class ties but that have different values in the files."""
        for key, ((store, name), *copies) in self._sources.items():
            for other, copy in copies if key.kind == WEIGHT else ():
                if not same_bytes(other.read(copy), store.read(name)):
                    yield next(each for each in (name, copy) if not each.endswith(key.name))

    def _prefix(self, store: ChunkedTensors) -> str:
        """Returns the prefix of the weights' names: the one that matches most of the expected names."""
        if self._names is None:
            return ""
        counts: Counter[str] = Counter()
        for stored in store.entries:
            if not _STATE.fullmatch(stored):
                # The model's names start at a component boundary of the stored name.
                parts = stored.split(".")
                for start in range(min(len(parts), 4)):
                    if self._first_name(".".join(parts[start:])) in self._names:
                        counts[".".join([*parts[:start], ""]) if start else ""] += 1
        # If several prefixes match equally often, take the shortest.
        return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default="")

    def _key(self, store: ChunkedTensors, stored: str, prefix: str) -> Key | None:
        """Returns the key of a stored tensor; `None` if it is neither a weight nor optimizer state, as RNG states."""
        path: Sequence[Any] = store.paths.get(stored, ()) if isinstance(store, StoreReader) else ()
        if self._names is None:
            match = _STATE.fullmatch(stored)
            if match is None or (len(path) == 1 and match["kind"] not in _ADAM):
                return Key(WEIGHT, path[-1] if path and isinstance(path[-1], str) else stored)
            return Key(match["kind"], match["name"])
        name = self._first_name(stored.removeprefix(prefix))
        if stored.startswith(prefix) and name in self._names:
            return Key(WEIGHT, name)
        if match := _STATE.fullmatch(stored):
            for start in (match["name"], match["name"].removeprefix(prefix), match["name"].removeprefix("module.")):
                if self._first_name(start) in self._names:
                    return Key(match["kind"], self._first_name(start))
        elif _GROUP.fullmatch(stored) or (
            prefix and not stored.startswith(prefix) and not store.entries[stored].dtype.is_floating_point
        ):
            return None
        raise CheckpointError(f"{self.path} has the tensor {stored}, which the model does not have.")

    def _ordered(self) -> Iterator[tuple[Key, list[tuple[ChunkedTensors, str]]]]:
        """Yields the tensors in model order, each weight before its moments."""
        for name in self._names or dict.fromkeys(key.name for key in self._sources):
            for kind in (WEIGHT, *MOMENTS):
                if sources := self._sources.get(Key(kind, name)):
                    yield Key(kind, name), sources

    def _optimizer_unsupported_reason(
        self, others: Sequence[str], moments: Sequence[Key], steps: Sequence[tuple[ChunkedTensors, str]]
    ) -> str | None:
        if others:
            return f"it is not Adam's: it has {', '.join(sorted(set(others))[:5])}"
        if moments and len({store.read(name).item() for store, name in steps}) != 1:
            return "its parameters have different step counts or none"
        lone = next((key for key in moments if any(Key(k, key.name) not in self.entries for k in MOMENTS)), None)
        return f"it is incomplete: it has only {lone}" if lone is not None else None

    def read(self, key: Key) -> Tensor:
        (store, name), *copies = self._sources[key]
        tensor = store.read(name, self.memory)
        for other, copy in copies:
            if not same_bytes(other.read(copy), tensor):
                raise CheckpointError(f"{self.path}: {name} and {copy} are the same weight of the model but differ.")
        return tensor


def _same(path: Path, sources: Sequence[tuple[ChunkedTensors, str]]) -> TensorMeta:
    entries = {store.entries[name] for store, name in sources}
    if len(entries) > 1:
        raise CheckpointError(
            f"{path}: {', '.join(name for _, name in sources)} are the same weight of the model but differ in shape or "
            "dtype."
        )
    return entries.pop()


def _stores(path: Path, most: int) -> Iterator[ChunkedTensors]:
    """Opens the folders with tensors: `path` itself, or Accelerate's subfolders."""
    if (path / METADATA).is_file():
        yield StoreReader(path, most)
        return
    if is_shard_folder(path):
        yield ShardFolder(path)
    folders = [path / name for name in ("pytorch_model_fsdp_0", "optimizer_0") if (path / name / METADATA).is_file()]
    if not folders and not is_shard_folder(path):
        raise CheckpointError(f"{path} has neither {METADATA} nor shard-*.safetensors.")
    yield from (StoreReader(folder, most) for folder in folders)


def _groups(store: StoreReader) -> list[Mapping[str, Any]]:
    """Returns the distinct settings of parameter groups."""
    groups: dict[str, dict[str, Any]] = {}
    for name in [*store.objects, *store.entries]:
        if (match := _GROUP.fullmatch(name)) is None or match["setting"] == "params":
            continue
        value = store.read_object(name) if name in store.objects else store.read(name).tolist()
        if isinstance(value, (int, float, str, bool, tuple, type(None))) and not isinstance(value, StoredTensor):
            groups.setdefault(match["group"], {})[match["setting"]] = value
    unique: list[Mapping[str, Any]] = []
    for _, group in sorted(groups.items()):
        settings = dict(sorted(group.items()))
        if settings not in unique:
            unique.append(settings)
    return unique

"""Reader of Megatron-Core's `torch_dist` checkpoints, one layer at a time and without Megatron.

File names in the docstrings are relative to `megatron/core` of megatron-core 0.16.1.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.io.random_access_file import DataFile
from ...core.io.safe_paths import is_file
from ...core.io.safetensors import MOST_TENSORS, TensorMeta
from ...core.text import error_summary, safe_repr
from ...errors import CheckpointError
from ..dcp.store_reader import METADATA, StoreReader
from ..interfaces import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, MegatronReader
from ..megatron.folder import iteration_folder
from ..torch_files.weight_file import read_saved
from .common_state import get_arguments, get_iteration, get_optimizer_state, list_optimizer_states

CONFIG = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"

# optimizer/distrib_optimizer.py, `sharded_param_state_fully_reshardable`; `fp32_param` is from optimizer/optimizer.py.
# With several optimizers (experts have a separate one), keys are prefixed by the optimizer's index.
_MOMENT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)")
_KINDS = {"param": MAIN_WEIGHT, "fp32_param": MAIN_WEIGHT, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
# transformer/transformer_block.py: stacked layers have a leading axis instead of an index in their names.
_STACKED = re.compile(r"((?:.+\.)?(?:layers|deepstack_merger_list))\.(?!\d)(.+)")
# transformer/mlp.py and transformer/moe/experts.py with `singleton_local_shards`.
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
# ssm/mamba_mixer.py, `_split_tensor_factory`: rows of the linear and of the convolution, in this order.
_BLOCK = re.compile(r"(.+\.mixer\.(?:in_proj\.weight|conv1d\.(?:weight|bias)))\.(z|x|B|C|dt)")
_BLOCKS = ("z", "x", "B", "C", "dt")
_ONE_EXPERT = re.compile(r"(.+\.mlp\.experts\.experts)\.(\d+)\.(.+)")
_MOST_LAYERS, _MOST_SHOWN = 100_000, 8
_RESAVE = "save it again with --dist-ckpt-optim-fully-reshardable"


@dataclass(frozen=True)
class _Part:
    """Location of one part of a tensor in the store; `layer` is an index in its leading axis."""

    stored: str
    layer: int | None


class MegatronCoreReader(MegatronReader):
    """A `torch_dist` checkpoint: an iteration folder, or the one with `latest_checkpointed_iteration.txt`.

    Args:
        most: maximum number of tensors.

    Attributes:
        arguments: Megatron-LM's arguments that are plain values; empty if the checkpoint has none.

    Raises:
        CheckpointError: it has another format, or is unsafe, damaged or incomplete.
    """

    def __init__(self, path: Path, most: int = MOST_TENSORS):
        self.path = iteration_folder(path)
        check_format(self.path)
        self._store = StoreReader(self.path, most)
        common = self._common()
        self.arguments = get_arguments(common, self.path / COMMON)
        self.iteration = get_iteration(common, self.path)
        parts: dict[Key, dict[tuple[int, int], _Part]] = {}
        others: list[str] = []
        for stored, entry in self._store.entries.items():
            if match := _MOMENT.fullmatch(stored):
                self._add(parts, _KINDS[match[1]], match[2], stored, entry)
            elif _OF_OPTIMIZER.match(stored):
                others.append(stored)
            elif "._extra_state" not in stored:
                self._add(parts, WEIGHT, stored, stored, entry)
        self._parts = {key: self._arranged(key, key_parts) for key, key_parts in parts.items()}
        entries = {key: self._entry(key) for key in sorted(self._parts, key=_order)}
        weights = {key: entry for key, entry in entries.items() if key.kind == WEIGHT}
        self.optimizer_unsupported_reason = _optimizer_unsupported_reason(entries, others, self._store.objects, common)
        self.optimizer = (
            None if self.optimizer_unsupported_reason or len(weights) == len(entries) else get_optimizer_state(common)
        )
        if self.optimizer is None and len(weights) < len(entries) and self.optimizer_unsupported_reason is None:
            self.optimizer_unsupported_reason = f"{COMMON} has no step count"
        self.entries = weights if self.optimizer is None else entries

    def _common(self) -> Mapping[Any, Any]:
        """Reads the unsharded state: from its own file, or (after 0.16) from the store."""
        if is_file(self.path / COMMON):
            common = read_saved(self.path / COMMON)
        elif COMMON_OBJECT in self._store.objects:
            common = self._store.read_object(COMMON_OBJECT)
            common = common[0] if isinstance(common, list) and len(common) == 1 else common
        else:
            raise CheckpointError(f"{self.path} has neither {COMMON} nor {COMMON_OBJECT} in its store.")
        if not isinstance(common, dict):
            raise CheckpointError(f"{self.path}: its common state is a {type(common).__name__}, not a dict.")
        return common

    def _add(
        self, parts: dict[Key, dict[tuple[int, int], _Part]], kind: str, name: str, stored: str, entry: TensorMeta
    ) -> None:
        """Records which tensors a stored one contains, keyed by expert index and by half or block index."""
        names: list[tuple[str, int | None]] = [(name, None)]
        if match := _STACKED.fullmatch(name):
            if not entry.shape or entry.shape[0] > _MOST_LAYERS:
                raise CheckpointError(f"{self.path}: {stored} of shape {list(entry.shape)} has no valid layer axis.")
            names = [(f"{match[1]}.{layer}.{match[2]}", layer) for layer in range(entry.shape[0])]
        for full, layer in names:
            half, expert = -1, -1
            if match := _HALF.fullmatch(full):
                full, half = match[1], "wv".index(match[2])
            elif match := _BLOCK.fullmatch(full):
                # A convolution has no z and dt.
                full, half = match[1], _BLOCKS.index(match[2]) - (".conv1d." in full)
            if match := _ONE_EXPERT.fullmatch(full):
                full, expert = f"{match[1]}.{match[3]}", int(match[2])
            key_parts = parts.setdefault(Key(kind, full), {})
            if (expert, half) in key_parts:
                raise CheckpointError(
                    f"{self.path} has {full} twice, as {key_parts[expert, half].stored} and {stored}."
                )
            key_parts[expert, half] = _Part(stored, layer)

    def _arranged(self, key: Key, key_parts: Mapping[tuple[int, int], _Part]) -> tuple[tuple[_Part, ...], ...]:
        """Orders the parts of a tensor: for each expert its halves or blocks, or a single part if it is not split."""
        experts = sorted({expert for expert, _ in key_parts})
        halves = sorted({half for _, half in key_parts})
        is_complete = experts in ([-1], list(range(len(experts)))) and (
            halves in ([-1], list(range(_parts_of(key.name))))
        )
        if not is_complete or len(key_parts) != len(experts) * len(halves):
            raise CheckpointError(f"{self.path}: {key} is incomplete: found (expert, half) {sorted(key_parts)[:8]}.")
        return tuple(tuple(key_parts[expert, half] for half in halves) for expert in experts)

    def _shape(self, part: _Part) -> tuple[int, ...]:
        shape = self._store.entries[part.stored].shape
        return shape if part.layer is None else shape[1:]

    def _stacks_experts(self, part: _Part) -> bool:
        return _ONE_EXPERT.search(part.stored) is not None

    def _entry(self, key: Key) -> TensorMeta:
        rows = self._parts[key]
        shapes = {tuple(self._shape(part) for part in row) for row in rows}
        dtypes = {self._store.entries[part.stored].dtype for row in rows for part in row}
        (shape, *others), *more = shapes
        if more or len(dtypes) > 1 or (others and any(not one or one[1:] != shape[1:] for one in (shape, *others))):
            raise CheckpointError(
                f"{self.path}: {key} is stored in tensors of inconsistent shapes or dtypes: {sorted(shapes)[:4]}."
            )
        if others:
            shape = (shape[0] + sum(other[0] for other in others), *shape[1:])
        return TensorMeta((len(rows), *shape) if self._stacks_experts(rows[0][0]) else shape, dtypes.pop())

    def read(self, key: Key) -> Tensor:
        entry, rows = self.entries[key], self._parts[key]
        out = self.memory.empty(entry.shape, entry.dtype)
        for row, target in zip(rows, out if self._stacks_experts(rows[0][0]) else [out], strict=True):
            boxes = target.split([self._shape(part)[0] for part in row]) if len(row) > 1 else [target]
            for part, box in zip(row, boxes, strict=True):
                if part.layer is None:
                    self._store.read_into(part.stored, [0] * box.dim(), box)
                else:
                    self._store.read_into(part.stored, [part.layer] + [0] * box.dim(), box[None])
        return out


def _parts_of(name: str) -> int:
    """Returns the number of parts in which a tensor of this name may be stored."""
    if ".mixer." not in name:
        return len("wv")
    return len(_BLOCKS) - 2 if ".conv1d." in name else len(_BLOCKS)


def check_format(path: Path) -> None:
    """Checks that a folder holds `torch_dist` (dist_checkpointing/core.py).

    Raises:
        CheckpointError: it does not; names the tool that can convert it.
    """
    if not (path / CONFIG).is_file():
        tool = "; convert fsdp_dtensor to torch_dist with Megatron-LM's tools/checkpoint/checkpoint_inspector.py"
        raise CheckpointError(f"{path} has no {CONFIG}{tool if (path / METADATA).is_file() else ''}.")
    with DataFile(path / CONFIG) as file:
        try:
            config = json.loads(file.read(0, min(file.size, 1 << 20)))
            backend, version = config["sharded_backend"], config.get("sharded_backend_version", 1)
            common = config.get("common_backend", "torch"), config.get("common_backend_version", 1)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file.path} is not valid checkpoint metadata: {error_summary(error)}.") from error
    if backend == "fsdp_dtensor":
        raise CheckpointError(
            f"{path} is in Megatron's fsdp_dtensor format, which is not supported. Convert it to torch_dist with "
            "Megatron-LM's tools/checkpoint/checkpoint_inspector.py."
        )
    if (backend, version, *common) != ("torch_dist", 1, "torch", 1):
        raise CheckpointError(
            f"{path} is in the format {safe_repr(backend)} {safe_repr(version)} (common state: "
            f"{' '.join(map(safe_repr, common))}), expected torch_dist 1. Load it with the Megatron version that wrote "
            "it and save it with --ckpt-format torch_dist."
        )


def _optimizer_unsupported_reason(
    entries: Mapping[Key, TensorMeta], others: Sequence[str], objects: Iterable[str], common: Mapping[Any, Any]
) -> str | None:
    """Returns why moments are not read, `None` if they are or if there are none."""
    states = list_optimizer_states(common)
    sharding_types = (state.get("param_state_sharding_type") for state in states)
    kinds = {safe_repr(kind) for kind in sharding_types if kind not in (None, "fully_reshardable")}
    hidden = [name for name in objects if _OF_OPTIMIZER.match(name)]
    if kinds or others or hidden:
        kind = ", ".join(sorted(kinds)[:_MOST_SHOWN]) or f"one with {(others or hidden)[0]}"
        return f"its format is {kind}, which only the same parallel layout can read: {_RESAVE}"
    for key, entry in entries.items():
        weight = entries.get(Key(WEIGHT, key.name))
        if weight is None or weight.shape != entry.shape:
            return f"{key} does not have the shape of its weight: {_RESAVE}"
    moments = {key for key in entries if key.kind in (EXP_AVG, EXP_AVG_SQ)}
    missing = [key for key in moments if not {Key(EXP_AVG, key.name), Key(EXP_AVG_SQ, key.name)} <= moments]
    return f"it is incomplete: it has only {missing[0]}" if missing else None


def _order(key: Key) -> tuple[bool, list[tuple[bool, int, str]], bool, str]:
    """Returns a sort key: embeddings first, then layers in order, each weight before its optimizer state."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.name.split(".")]
    return not key.name.startswith("embedding."), parts, key.kind != WEIGHT, key.kind

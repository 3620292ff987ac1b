"""Writer of this library's sharded checkpoints, which resume on every layout."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.manifest import MANIFEST, ChunkEntry, Manifest, TensorEntry
from ...checkpoint.packed_state import pack
from ...core.io.safetensors import SafetensorsWriter, TensorMeta
from ..architecture import Architecture
from ..interfaces import WEIGHT, Key, OptimizerState, Writer
from ..output_folder import Output
from .reader import full_chunk


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


class ShardedWriter(Writer):
    """Writer of a checkpoint that resumes on every layout.

    Moments are assigned to the parameters of the resuming run, whatever its groups; it keeps its own hyperparameters.

    Args:
        iteration: optimizer steps taken so far.
        optimizer: state of the optimizer whose moments are in the plan.
    """

    def __init__(
        self,
        output: Output,
        plan: Mapping[Key, TensorMeta],
        architecture: Architecture,
        iteration: int | None,
        optimizer: OptimizerState | None,
    ):
        super().__init__(plan)
        self._output = output
        self._architecture, self._iteration, self._optimizer = architecture, iteration, optimizer
        self._file_of: dict[Key, str] = {}
        planned: dict[str, dict[str, TensorMeta]] = {}
        for key, entry in plan.items():
            # One file per dtype: tensors stay aligned in any order.
            name = f"shard-{key.kind}-{str(entry.dtype).removeprefix('torch.')}.safetensors"
            self._file_of[key] = name
            planned.setdefault(name, {})[key.name] = entry
        self._streams = {name: SafetensorsWriter(output.create(name), entries) for name, entries in planned.items()}

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check(key, tensor)
        self._streams[self._file_of[key]].write(key.name, tensor)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.finish()
        self._output.before_commit(self._write_manifest)

    def _write_manifest(self) -> None:
        from transformers import TrainerState

        # Trainer resumes counting steps from this state.
        state = dataclasses.asdict(TrainerState(global_step=self._iteration or 0))
        self._output.add("trainer_state.json", json.dumps(state, indent=2, sort_keys=True) + "\n")
        tensors = {}
        for key, entry in self.plan.items():
            name = key.name if key.kind == WEIGHT else f"optimizer/0/{key.kind}/{key.name}"
            piece = ChunkEntry(self._file_of[key], key.name, (full_chunk(entry),))
            tensors[name] = TensorEntry(entry.shape, entry.dtype, (piece,))
        manifest = Manifest(1, self._facts(), self._output.digests(), dict(sorted(tensors.items())))
        self._output.add(MANIFEST, json.dumps(manifest.to_dict(), separators=(",", ":")))

    def _facts(self) -> dict[str, Any]:
        model = self._architecture.model
        optimizers, hyperparameters = [], []
        if self._optimizer is not None:
            for group in self._optimizer.hyperparameters:
                hyperparameters.append(pack({name: value for name, value in group.items() if _is_plain(value)}, {}))
            moments: dict[str, list[str]] = {}
            for key in self.plan:
                if key.kind != WEIGHT:
                    moments.setdefault(key.name, []).append(key.kind)
            step = pack({"step": torch.tensor(float(self._optimizer.step))}, {})
            optimizers.append(
                {
                    "class": "AdamW",
                    "groups": None,
                    "scalars": dict.fromkeys(moments, step),
                    "moments": {name: sorted(kinds) for name, kinds in moments.items()},
                }
            )
        return {
            "model": {"class": type(model).__name__, "model_type": model.config.model_type},
            "layout": None,
            "world_size": 1,
            "optimizers": optimizers,
            "skipped_steps": 0,
            "step": self._iteration or 0,
            "converted": {"hyperparameters": hyperparameters},
        }

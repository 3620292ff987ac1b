"""The library's own sharded checkpoints, of any layout: Trainer's and `Accelerator.save_state`'s folders."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.manifest import MANIFEST, Manifest, PieceEntry, TensorEntry, inside
from ..checkpoint.packing import pack, unpack
from ..checkpoint.pieces import Box
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from .architecture import Architecture
from .output import Output
from .safetensors_file import SafetensorsFile, SafetensorsStream
from .tensors import MAIN_WEIGHT, MOMENTS, WEIGHT, Entry, Key, Layout, OptimizerState, Reader, Writer

_KINDS = (MAIN_WEIGHT, *MOMENTS)


class ShardedReader(Reader):
    """A sharded checkpoint.

    Args:
        path: its folder.
        architecture: its model.
        verify (`bool`, defaults to `True`): compare all checksums first.

    Raises:
        CheckpointError: it is incomplete or damaged, or holds other weights than the architecture has.
    """

    def __init__(self, path: Path, architecture: Architecture, verify: bool = True):
        self._checkpoint = Checkpoint(path)
        self._files: dict[str, SafetensorsFile] = {}
        if verify:
            self._checkpoint.verify()
        facts = self._checkpoint.facts
        step = facts.get("step")
        self.iteration = step if isinstance(step, int) else None
        described = facts.get("optimizers") or []
        try:
            self.optimizer, self.optimizer_refusal = _optimizer(described, facts.get("converted"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: what its manifest says of the optimizer cannot be read: {error!r}"
            ) from error
        names = {Key(WEIGHT, name): name for name in self._checkpoint.names() if not name.startswith("optimizer/")}
        architecture.check((key.name for key in names), str(path))
        stored_kinds = {name.split("/")[2] for name in self._checkpoint.names() if name.startswith("optimizer/0/")}
        if further := sorted(stored_kinds - set(_KINDS)):
            self.optimizer, self.optimizer_refusal = None, f"it keeps {', '.join(further)} too"
        if self.optimizer is not None:
            for kind in _KINDS:
                prefix = f"optimizer/0/{kind}/"
                stored = (name for name in self._checkpoint.names() if name.startswith(prefix))
                names |= {Key(kind, name.removeprefix(prefix)): name for name in stored}
        if unknown := [str(key) for key in names if key.name not in architecture.names]:
            raise CheckpointError(
                f"{path} has {', '.join(unknown[:5])}, which {type(architecture.model).__name__} has not."
            )
        self._names = {key: names[key] for key in sorted(names, key=architecture.sort_key)}
        self.entries = {
            key: Entry(self._checkpoint.shape(name), self._checkpoint.dtype(name)) for key, name in self._names.items()
        }

    def read(self, key: Key) -> Tensor:
        entry, name = self.entries[key], self._names[key]
        pieces = self._checkpoint.manifest.tensors[name].pieces
        if pieces[0].boxes == (_whole(entry),):
            file, stored = self._file(pieces[0].file), pieces[0].key
            span = file.spans.get(stored)
            if span is None or (span.dtype, span.numel) != (entry.dtype, torch.Size(entry.shape).numel()):
                raise CheckpointError(f"{file.path}: {stored!r} is not what the manifest says of {name}.")
            return file.read(stored, self.memory).view(entry.shape)
        out = self.memory.empty([torch.Size(entry.shape).numel()], entry.dtype)
        self._checkpoint.read(name, [_whole(entry)], out)
        self._checkpoint.forget()
        return out.view(entry.shape)

    def _file(self, name: str) -> SafetensorsFile:
        """A file of which whole tensors are read: what is mapped counts as memory until it is given back."""
        if name not in self._files:
            self._files[name] = SafetensorsFile(inside(self._checkpoint.path, name))
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _whole(entry: Entry) -> Box:
    return Box((0,) * len(entry.shape), entry.shape)


def _optimizer(described: list[dict[str, Any]], converted: Any) -> tuple[OptimizerState | None, str | None]:
    """What the manifest says of the optimizer, or why it cannot be converted.

    Args:
        converted: what `ShardedWriter` noted, if it wrote the checkpoint.
    """
    if not described:
        return None, None
    if len(described) > 1:
        return None, f"the checkpoint holds {len(described)} optimizers, one can be converted"
    (optimizer,) = described
    if optimizer["class"] not in ("Adam", "AdamW"):
        return None, f"the moments of {optimizer['class']} have no counterpart, those of Adam and AdamW have"
    scalars = [unpack(values, {}) for values in optimizer["scalars"].values()]
    steps = {int(values["step"]) for values in scalars if "step" in values}
    if len(steps) > 1:
        return None, f"its parameters have taken different numbers of steps, from {min(steps)} to {max(steps)}"
    packed = converted["hyperparameters"] if converted else [g["hyperparameters"] for g in optimizer["groups"]]
    return OptimizerState(steps.pop() if steps else 0, tuple(unpack(group, {}) for group in packed)), None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


class ShardedWriter(Writer):
    """Writes a checkpoint that resumes on every layout.

    Moments go to the parameters of the run that resumes, whatever groups it has; its hyperparameters stay.

    Args:
        iteration: optimizer steps taken so far.
        optimizer: of the moments in the plan.
    """

    def __init__(
        self,
        output: Output,
        plan: Mapping[Key, Entry],
        architecture: Architecture,
        layout: Layout,
        iteration: int | None,
        optimizer: OptimizerState | None,
    ):
        self.plan, self._output = plan, output
        self._architecture, self._iteration, self._optimizer = architecture, iteration, optimizer
        self._file_of: dict[Key, str] = {}
        planned: dict[str, dict[str, Entry]] = {}
        for key, entry in plan.items():
            # One file per dtype: tensors stay aligned in any order.
            name = f"shard-{key.kind}-{_name(entry.dtype)}.safetensors"
            self._file_of[key] = name
            planned.setdefault(name, {})[key.name] = entry
        self._streams = {name: SafetensorsStream(output.create(name), entries) for name, entries in planned.items()}

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check(key, tensor)
        self._streams[self._file_of[key]].write(key.name, tensor)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.finish()
        self._output.before_commit(self._write_manifest)

    def _write_manifest(self) -> None:
        from transformers import TrainerState

        # From which Trainer goes on counting.
        state = dataclasses.asdict(TrainerState(global_step=self._iteration or 0))
        self._output.add("trainer_state.json", json.dumps(state, indent=2, sort_keys=True) + "\n")
        tensors = {_stored(key): self._tensor(key, entry) for key, entry in self.plan.items()}
        manifest = Manifest(1, self._facts(), self._output.entries(), dict(sorted(tensors.items())))
        self._output.add(MANIFEST, json.dumps(manifest.to_dict(), separators=(",", ":")))

    def _tensor(self, key: Key, entry: Entry) -> TensorEntry:
        piece = PieceEntry(self._file_of[key], key.name, (_whole(entry),))
        return TensorEntry(entry.shape, entry.dtype, (piece,))

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored(key: Key) -> str:
    return key.name if key.kind == WEIGHT else f"optimizer/0/{key.kind}/{key.name}"

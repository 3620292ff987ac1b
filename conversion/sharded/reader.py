"""Reader of this library's sharded checkpoints of any layout: Trainer's and `Accelerator.save_state`'s folders."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ...checkpoint.packed_state import unpack
from ...checkpoint.reader import Checkpoint
from ...checkpoint.tensor_chunks import TensorChunk
from ...core.io.safe_paths import inside
from ...core.io.safetensors import SafetensorsFile, TensorMeta
from ...core.text import error_summary
from ...errors import CheckpointError
from ..architecture import Architecture
from ..interfaces import MAIN_WEIGHT, MOMENTS, WEIGHT, Key, OptimizerState, Reader

_KINDS = (MAIN_WEIGHT, *MOMENTS)


class ShardedReader(Reader):
    """A sharded checkpoint.

    Args:
        verify: compare all checksums when opening.

    Raises:
        CheckpointError: it is incomplete or damaged, or its weights are not the weights of the architecture.
    """

    def __init__(self, path: Path, architecture: Architecture, verify: bool = True):
        self._checkpoint = Checkpoint(path)
        self._files: dict[str, SafetensorsFile] = {}
        if verify:
            self._checkpoint.verify()
        facts = self._checkpoint.metadata
        step = facts.get("step")
        self.iteration = step if isinstance(step, int) else None
        described = facts.get("optimizers") or []
        try:
            self.optimizer, self.optimizer_unsupported_reason = _optimizer(described, facts.get("converted"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: the optimizer entry of its manifest cannot be read: {error_summary(error)}"
            ) from error
        names = {Key(WEIGHT, name): name for name in self._checkpoint.names() if not name.startswith("optimizer/")}
        architecture.check((key.name for key in names), str(path))
        stored_kinds = {name.split("/")[2] for name in self._checkpoint.names() if name.startswith("optimizer/0/")}
        if further := sorted(stored_kinds - set(_KINDS)):
            self.optimizer, self.optimizer_unsupported_reason = None, f"it also has {', '.join(further)}"
        if self.optimizer is not None:
            for kind in _KINDS:
                prefix = f"optimizer/0/{kind}/"
                stored = (name for name in self._checkpoint.names() if name.startswith(prefix))
                names |= {Key(kind, name.removeprefix(prefix)): name for name in stored}
        if unknown := [str(key) for key in names if key.name not in architecture.names]:
            raise CheckpointError(
                f"{path} has {', '.join(unknown[:5])}, which {type(architecture.model).__name__} does not have."
            )
        self._names = {key: names[key] for key in sorted(names, key=architecture.sort_key)}
        self.entries = {
            key: TensorMeta(self._checkpoint.shape(name), self._checkpoint.dtype(name))
            for key, name in self._names.items()
        }

    def read(self, key: Key) -> Tensor:
        entry, name = self.entries[key], self._names[key]
        pieces = self._checkpoint.manifest.tensors[name].pieces
        if pieces[0].boxes == (full_chunk(entry),):
            file, stored = self._file(pieces[0].file), pieces[0].key
            span = file.locations.get(stored)
            if span is None or (span.dtype, span.numel) != (entry.dtype, entry.numel):
                raise CheckpointError(f"{file.path}: {stored!r} does not match the manifest entry of {name}.")
            return file.read(stored, self.memory).view(entry.shape)
        out = self.memory.empty([entry.numel], entry.dtype)
        self._checkpoint.read(name, [full_chunk(entry)], out)
        self._checkpoint.forget()
        return out.view(entry.shape)

    def _file(self, name: str) -> SafetensorsFile:
        """Opens a file to read full tensors directly; mapped pages would count as used memory until released."""
        if name not in self._files:
            self._files[name] = SafetensorsFile(inside(self._checkpoint.path, name))
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def full_chunk(entry: TensorMeta) -> TensorChunk:
    """Returns the box that covers a full tensor of any shape."""
    return TensorChunk((0,) * len(entry.shape), entry.shape)


def _optimizer(described: list[dict[str, Any]], converted: Any) -> tuple[OptimizerState | None, str | None]:
    """Returns the optimizer state described by the manifest, or why it cannot be converted.

    Args:
        converted: metadata recorded by `ShardedWriter`, if it wrote the checkpoint.
    """
    if not described:
        return None, None
    if len(described) > 1:
        return None, f"the checkpoint has {len(described)} optimizers, but only one can be converted"
    (optimizer,) = described
    if optimizer["class"] not in ("Adam", "AdamW"):
        return None, f"the state of {optimizer['class']} has no counterpart; only Adam and AdamW can be converted"
    scalars = [unpack(values, {}) for values in optimizer["scalars"].values()]
    steps = {int(values["step"]) for values in scalars if "step" in values}
    if len(steps) > 1:
        return None, f"its parameters have different step counts, from {min(steps)} to {max(steps)}"
    packed = converted["hyperparameters"] if converted else [g["hyperparameters"] for g in optimizer["groups"]]
    return OptimizerState(steps.pop() if steps else 0, tuple(unpack(group, {}) for group in packed)), None

"""Selection of the checkpoint files that a rank of a layout needs, without a process group."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoint.local_shards import holding, named_tensors
from ...checkpoint.manifest import ChunkEntry, Manifest, TensorEntry
from ...checkpoint.tensor_chunks import TensorChunk, overlaps
from ...config import MegatronConfig
from ...core.axes import Axes
from ...parallel_state import ParallelState
from ...parallelize import plan


@dataclass(frozen=True)
class Stage:
    """Planned model of a pipeline stage: the state of one of its ranks, and global shapes of weights and buffers."""

    state: ParallelState
    shapes: Mapping[str, tuple[int, ...]]

    def of_rank(self, axes: Axes) -> "Stage":
        """Returns the stage with the state of another of its ranks."""
        return Stage(replace(self.state, axes=axes), self.shapes)


def stage_of(model: Any, config: MegatronConfig, axes: Axes) -> Stage:
    """Plans a model on the meta device, modifying it; raises `MegatronError` if it does not support the layout."""
    state = plan(model, config, axes)
    return Stage(state, {name: tuple(tensor.shape) for name, tensor in named_tensors(model)})


def files_for(manifest: Manifest, stage: Stage, *, optimizer: bool) -> set[str]:
    """Returns the files of a sharded checkpoint with this rank's weights and, optionally, its optimizer moments."""
    files: set[str] = set()
    for stored, entry in manifest.tensors.items():
        moment = stored.startswith("optimizer/")
        if moment and not optimizer:
            continue
        # optimizer/<number>/<key>/<name>
        name = stored.split("/", 3)[3] if moment else stored
        if name in stage.shapes and stage.shapes[name] == entry.shape:
            held = holding(stage.state, name, entry.shape, is_moment=moment)
            files |= _holding(entry, held.boxes(), files)
    return files


def _holding(entry: TensorEntry, boxes: tuple[TensorChunk, ...], chosen: set[str]) -> set[str]:
    """Returns files with chunks that overlap `boxes`; among duplicates one file, preferably one already chosen."""
    copies: dict[tuple[TensorChunk, ...], list[ChunkEntry]] = {}
    for piece in entry.pieces:
        copies.setdefault(piece.boxes, []).append(piece)
    files: set[str] = set()
    for held, pieces in copies.items():
        if overlaps(held, boxes):
            names = [piece.file for piece in pieces]
            files.add(next((name for name in names if name in chosen | files), names[0]))
    return files


def merged_files_for(index: Mapping[str, str], stage: Stage) -> set[str]:
    """Returns the files of an index (weight -> file) with weights of a stage; tp ranks read a shard of each."""
    # Weight files of a base model lack its prefix.
    prefixes = {name.partition(".")[0] for name in stage.shapes}
    return {
        file
        for weight, file in index.items()
        if not {weight, *(f"{prefix}.{weight}" for prefix in prefixes)} & stage.state.names.off_stage
    }

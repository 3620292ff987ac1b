"""What a rank of a layout holds of a model, told without a process group: the model's config and a number suffice."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..communication.collectives import bounds
from ..config import MegatronConfig
from ..data_parallel.buckets import owned_range
from ..errors import ConfigError, UnsupportedError
from ..pipeline_parallel.cut import cut
from ..registry import own_spec, spec_for
from ..registry.claims import claim_all, expand_plan, shared_heads
from ..spec import ModelSpec, Placement
from ..tensor_parallel.structure import Structure
from ..upstream import renamed_by_loader
from .holdings import named_tensors
from .manifest import Manifest, PieceEntry, TensorEntry
from .pieces import Box, local_boxes, overlaps


@dataclass(frozen=True)
class Seat:
    """Where a rank sits; the attributes are those of `ParallelMesh`, which has process groups too."""

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int
    shard_size: int
    shard_rank: int

    @classmethod
    def of(cls, config: MegatronConfig, rank: int) -> "Seat":
        """The seat of a rank: tp innermost, dp outermost, as in `mesh.AXES`.

        Raises:
            ConfigError: the layout has no such rank.
            UnsupportedError: the layout has an axis that this arithmetic does not know.
        """
        for name in ("cp_size", "ep_size"):
            if getattr(config, name) != 1:
                raise UnsupportedError(
                    f"MegatronConfig.{name} = {getattr(config, name)}: what a rank of it needs is not worked out; pull "
                    "without a rank, which fetches everything."
                )
        dp_size = config.dp_size or 1
        replicas = dp_size if config.zero_stage == 0 else config.dp_replicate_size
        if dp_size % replicas:
            raise ConfigError(f"MegatronConfig.dp_replicate_size = {replicas}: does not divide dp_size = {dp_size}.")
        ranks = config.tp_size * config.pp_size * dp_size
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank = {rank}: the layout {config.layout()} has the ranks 0 to {ranks - 1}.")
        replica, tp_rank = divmod(rank, config.tp_size)
        dp_rank, pp_rank = divmod(replica, config.pp_size)
        shards = dp_size // replicas
        return cls(config.tp_size, tp_rank, config.pp_size, pp_rank, dp_size, shards, dp_rank % shards)


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline stage have of a model.

    Attributes:
        shapes: global shape by name, of weights and persistent buffers.
        placements: how weights are split over tp; what is not named is whole on every rank.
        elsewhere: names of weights that other stages have, under the names of files too.
    """

    shapes: Mapping[str, tuple[int, ...]]
    placements: Mapping[str, Placement]
    elsewhere: frozenset[str]


def stage_of(model: Any, config: MegatronConfig, seat: Seat) -> Stage:
    """Cuts a model on the meta device as `parallelize.place` does; the model is changed.

    Raises:
        MegatronError: as `place`, for a model that cannot be laid out so.
    """
    placements: dict[str, Placement] = {}
    if config.tp_size > 1:
        spec = spec_for(model)
        styles = expand_plan(model, spec)
        copies = shared_heads(model, styles, config.tp_size)
        # Only gradients depend on the structure and on sequence parallelism.
        claims = claim_all(model, styles, Structure(), copies, False)
        placements = {name: claim.placement for name, claim in claims.items()}
    else:
        spec = own_spec(model) or ModelSpec(model.config.model_type)
    elsewhere: set[str] = set()
    if config.pp_size > 1:
        names = set(model.state_dict())
        place: Any = seat
        cut(model, spec, config, place)
        elsewhere = names - model.state_dict().keys()
        elsewhere |= renamed_by_loader(model, elsewhere)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    return Stage(shapes, placements, frozenset(elsewhere))


def _boxes(stage: Stage, name: str, config: MegatronConfig, seat: Seat, *, moment: bool) -> tuple[Box, ...]:
    """The entries of a weight, or of a moment of it, that a rank holds."""
    shape, placement = stage.shapes[name], stage.placements.get(name, Placement())
    local = list(shape)
    if placement.dim is not None:
        intervals = placement.intervals(shape[placement.dim], seat.tp_size, seat.tp_rank)
        local[placement.dim] = sum(stop - start for start, stop in intervals)
    entries = _numel(local)
    start, stop = 0, entries
    if seat.shard_size > 1 and config.zero_stage == 3 and local:
        row = _numel(local[1:])
        first, last = bounds(local[0], seat.shard_size, seat.shard_rank)
        start, stop = first * row, last * row
    elif seat.shard_size > 1 and config.zero_stage in (1, 2) and moment:
        start, stop = owned_range(entries, seat.shard_size, seat.shard_rank)
    return local_boxes(shape, placement, seat.tp_size, seat.tp_rank, start, stop)


def _numel(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def files_for(manifest: Manifest, stage: Stage, config: MegatronConfig, seat: Seat, *, optimizer: bool) -> set[str]:
    """The files of a sharded checkpoint that hold what a rank needs of weights and, if asked for, of moments."""
    files: set[str] = set()
    for stored, entry in manifest.tensors.items():
        moment = stored.startswith("optimizer/")
        if moment and not optimizer:
            continue
        # optimizer/<number>/<key>/<name>
        name = stored.split("/", 3)[3] if moment else stored
        if name in stage.shapes and stage.shapes[name] == entry.shape:
            files |= _holding(entry, _boxes(stage, name, config, seat, moment=moment), files)
    return files


def _holding(entry: TensorEntry, boxes: tuple[Box, ...], chosen: set[str]) -> set[str]:
    """Files with the pieces that overlap the boxes; of copies one, a file that is needed anyway if there is one."""
    copies: dict[tuple[Box, ...], list[PieceEntry]] = {}
    for piece in entry.pieces:
        copies.setdefault(piece.boxes, []).append(piece)
    found: set[str] = set()
    for held, pieces in copies.items():
        if overlaps(held, boxes):
            names = [piece.file for piece in pieces]
            found.add(next((name for name in names if name in chosen | found), names[0]))
    return found


def merged_files_for(index: Mapping[str, str], stage: Stage) -> set[str]:
    """The files of Hugging Face weights with one that a stage has; tp ranks each read a part of all of them.

    Args:
        index: weight -> file.
    """
    # Files of a base model lack its prefix.
    prefixes = {name.partition(".")[0] for name in stage.shapes}
    return {
        file
        for weight, file in index.items()
        if not {weight, *(f"{prefix}.{weight}" for prefix in prefixes)} & stage.elsewhere
    }

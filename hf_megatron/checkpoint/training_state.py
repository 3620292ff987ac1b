"""Model and optimizers in a sharded checkpoint: each rank writes its share, and any layout can read it.

| in the checkpoint | content |
|---|---|
| tensor `<name>` | a weight or buffer under its name in the state dict |
| tensor `optimizer/<number>/<key>/<name>` | a moment of that weight; key `main_weight` is its fp32 copy |
| | of optimizers that step on full parameters: any state tensor, of its own shape; key `nested.GG.0` is in a list |
| metadata `optimizers` | hyperparameters of the groups, names of their parameters and moments, steps |
| metadata `converted` | made from another library's checkpoint: `groups` is null, the loading run uses its own |

Every pipeline stage writes and reads its own tensors; the metadata describe the full model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_dtensor import is_packed, local_tensor
from ..core.communication.rank_errors import gather, propagate_errors
from ..core.off_stage import is_off_stage
from ..data_parallel.combined_optimizers import list_stepping
from ..data_parallel.distributed_optimizer import sharded
from ..data_parallel.main_params import MainParam
from ..errors import CheckpointError
from ..parallel_state import ParallelState, parallel_state
from .local_shards import LocalShard, full_state_holding, leaf_holding, model_pieces, named_tensors, parameter_holding
from .packed_state import pack, unpack
from .reader import Checkpoint
from .stage_consistency import check_copies, gather_from_stages, in_order, join_stages, resharded, tied_weights
from .strict_loading import empty_in_huge_pages
from .tensor_chunks import LocalChunk

MAIN_WEIGHT = "main_weight"
# Prefix of the keys of tensors inside lists and mappings of an optimizer's state.
NESTED = "nested"


def _leaves(model: Any, optimizer: torch.optim.Optimizer) -> list[MainParam]:
    """Returns the main params of a prepared optimizer; for a stock optimizer, the parameters themselves."""
    prepared = sharded(optimizer)
    if prepared is not None:
        return prepared.leaves
    names = {id(parameter): name for name, parameter in resharded(model).named_parameters()}
    parameters = [parameter for group in _own_groups(optimizer) for parameter in group]
    return [MainParam(names[id(p)], p, 0, local_tensor(p).numel(), p, False, False) for p in parameters]


def _own_groups(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """Returns the parameters of each group, of any shape, that this rank updates."""
    return [[p for p in group["params"] if not is_off_stage(p)] for group in optimizer.param_groups]


def _key(number: int, key: str, name: str) -> str:
    return f"optimizer/{number}/{key}/{name}"


def _moments(optimizer: torch.optim.Optimizer, leaf: MainParam) -> dict[str, Tensor]:
    """Returns the optimizer states of a main param that can be written as tensors.

    State of a shard must have a value per entry; state of a full parameter may have any shape, and be in lists and
    mappings (SOAP).
    """
    state = optimizer.state.get(leaf.tensor, {})
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}
    if leaf.covers_parameter:
        pack({key: value for key, value in state.items() if isinstance(value, (list, tuple, dict))}, tensors, NESTED)
        return tensors
    size = local_tensor(leaf.tensor).numel()
    return {key: value for key, value in tensors.items() if local_tensor(value).numel() == size}


def _state_holding(state: ParallelState | None, leaf: MainParam, key: str, shape: tuple[int, ...]) -> LocalShard:
    """Returns this rank's local shard of a main param's state tensor; state of a full parameter has `shape`."""
    if key == MAIN_WEIGHT or not leaf.covers_parameter:
        return leaf_holding(state, leaf)
    return full_state_holding(state, leaf, shape)


def _stores_state(state: ParallelState | None, leaf: MainParam) -> bool:
    """Returns whether this rank has the optimizer state of a main param, and not another one."""
    return state is None or leaf.full is None or leaf.full.owner == state.axes.world_rank


def _scalars(optimizer: torch.optim.Optimizer, leaf: MainParam) -> dict[str, Any]:
    moments = _moments(optimizer, leaf)
    return {key: value for key, value in optimizer.state.get(leaf.tensor, {}).items() if key not in moments}


def _stored(optimizer: torch.optim.Optimizer, leaf: MainParam) -> dict[str, Tensor]:
    """Returns the moments of a main param, and its values if they are more precise than the parameter's."""
    is_more_precise = leaf.separate and leaf.tensor.dtype != leaf.parameter.dtype
    return _moments(optimizer, leaf) | ({MAIN_WEIGHT: leaf.tensor} if is_more_precise else {})


def optimizer_pieces(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Iterator[LocalChunk]:
    """Yields this rank's share of an optimizer's moments and main weights."""
    state = parallel_state(model)
    for leaf in _leaves(model, optimizer):
        for key, tensor in _stored(optimizer, leaf).items():
            holding = _state_holding(state, leaf, key, tuple(tensor.shape))
            piece = holding.share(_key(number, key, leaf.name), local_tensor(tensor))
            if piece is not None:
                yield piece


def pieces(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[LocalChunk]:
    """Yields all chunks that this rank writes."""
    yield from model_pieces(model)
    for number, optimizer in enumerate(list_stepping(optimizers)):
        yield from optimizer_pieces(model, optimizer, number)


def write_config(model: Any, directory: Path) -> None:
    """Writes the model's config files as `save_pretrained` does."""
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def training_metadata(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns the manifest's metadata, identical on all ranks; collective.

    Raises:
        CheckpointError: pipeline stages hold different copies of a tied weight or of its moments, or have different
            parameter groups; or an optimizer's state cannot be read in another layout.
    """
    state, optimizers = parallel_state(model), list_stepping(optimizers)
    with propagate_errors("Saving"):
        described = [_describe(model, optimizer) for optimizer in optimizers]
    if state is not None and any(leaf.full is not None for o in optimizers for leaf in _leaves(model, o)):
        described = _from_owners(state, described)
    if state is not None and state.cut is not None:
        check_copies(state, _tied_tensors(model, state, optimizers))
        described = _from_full_model(state, described)
    skipped = 0 if state is None or state.data_parallel is None else state.data_parallel.step_status.skipped_steps
    return {
        "model": {"class": type(model).__name__.removeprefix("FSDP"), "model_type": model.config.model_type},
        "layout": None if state is None else state.config.to_dict(),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "optimizers": described,
        "skipped_steps": skipped,
    }


def _tied_tensors(model: Any, state: ParallelState, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Returns the saved tensors of weights that are tied across the ends of the pipeline."""
    tensors = tied_weights(model)
    for number, optimizer in enumerate(optimizers):
        for leaf in _leaves(model, optimizer):
            if state.is_tied(leaf.name):
                stored = _stored(optimizer, leaf).items()
                tensors |= {_key(number, key, leaf.name): tensor for key, tensor in stored}
    return tensors


def _reject_packed_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises `CheckpointError` for state in tensor subclasses that hold several tensors (torchao)."""
    for value in (value for state in optimizer.state.values() for value in state.values()):
        if is_packed(value):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps its state in {type(value).__name__} tensors, which cannot be saved. "
                "Use bitsandbytes.optim.AdamW8bit to save and resume 8-bit states."
            )


def _describe(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    _reject_packed_state(optimizer)
    leaves = _leaves(model, optimizer)
    remaining = iter(leaves)
    tensors: dict[str, Tensor] = {}
    groups = []
    for group, group_params in zip(optimizer.param_groups, _own_groups(optimizer), strict=True):
        names = [next(remaining).name for _ in group_params]
        hyperparameters = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"names": names, "hyperparameters": pack(hyperparameters, tensors, "group")})
    scalars = {}
    for leaf in leaves:
        if values := _scalars(optimizer, leaf):
            inner: dict[str, Tensor] = {}
            scalars[leaf.name] = pack(values, inner, NESTED)
            stored = _moments(optimizer, leaf) if inner else {}
            tensors |= {
                f"{leaf.name}.{key.removeprefix(NESTED + '.')}": tensor
                for key, tensor in inner.items()
                if key not in stored
            }
    if tensors:
        raise CheckpointError(
            f"{type(optimizer).__name__} has state tensors that are not per parameter entry: "
            f"{', '.join(sorted(tensors)[:3])}. Such state cannot be resharded for another layout and is not supported."
        )
    moments = {leaf.name: sorted(keys) for leaf in leaves if (keys := _stored(optimizer, leaf))}
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars, "moments": moments}


def _from_owners(state: ParallelState, described: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges the optimizer descriptions of the ranks of a stage, each of which has the state of some parameters."""
    parts = gather(described, state.mesh.group("stage"), "Saving")
    merged = []
    for number, description in enumerate(described):
        names = [name for group in description["groups"] for name in group["names"]]
        scalars = {name: value for part in parts for name, value in part[number]["scalars"].items()}
        moments: dict[str, set[str]] = {}
        for part in parts:
            for name, keys in part[number]["moments"].items():
                moments.setdefault(name, set()).update(keys)
        ordered = {
            "scalars": {name: scalars[name] for name in names if name in scalars},
            "moments": {name: sorted(moments[name]) for name in names if name in moments},
        }
        merged.append({**description, **ordered})
    return merged


def _from_full_model(state: ParallelState, described: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges the optimizer descriptions of all stages into single-process descriptions."""
    parts = gather_from_stages(state, described)
    _check_same_optimizers(parts)
    merged = []
    for number, description in enumerate(described):
        stages = [part[number] for part in parts]
        groups = [
            {**group, "names": in_order(state, [n for stage in stages for n in stage["groups"][index]["names"]])}
            for index, group in enumerate(description["groups"])
        ]
        by_name = {key: join_stages(state, description[key]) for key in ("scalars", "moments")}
        merged.append({"class": description["class"], "groups": groups, **by_name})
    return merged


def _check_same_optimizers(parts: list[list[dict[str, Any]]]) -> None:
    """Raises unless the stages' optimizers differ only in the parameters they hold."""
    outlines = [
        [(optimizer["class"], [group["hyperparameters"] for group in optimizer["groups"]]) for optimizer in part]
        for part in parts
    ]
    for rank, outline in enumerate(outlines):
        if outline != outlines[0]:
            listing = "; ".join(
                f"pipeline rank {number}: " + ", ".join(f"{name} with {len(groups)} groups" for name, groups in other)
                for number, other in ((0, outlines[0]), (rank, outline))
            )
            raise CheckpointError(
                f"The optimizers differ between pipeline stages in class, groups or hyperparameters ({listing}). "
                "Create the same groups in the same order on every stage, each with the parameters of its stage; a "
                "group may be empty."
            )


def _read(
    checkpoint: Checkpoint, name: str, holding: LocalShard, shape: torch.Size, old: Tensor | None = None
) -> Tensor:
    """Reads this rank's local shard into CPU memory, reusing the memory of `old` if it fits."""
    dtype, size = checkpoint.dtype(name), holding.stop - holding.start
    if old is None or (old.device.type, old.dtype, old.numel()) != ("cpu", dtype, size) or not old.is_contiguous():
        old = empty_in_huge_pages(torch.Size([size]), dtype)
    out = old.view(-1)
    checkpoint.read(name, holding.boxes(), out)
    return out.view(shape)


@torch.no_grad()
def load_model(model: Any, checkpoint: Checkpoint, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Loads a model's weights from a checkpoint of any layout; nothing is modified unless everything matches.

    Returns:
        `tuple`: names missing in the checkpoint and names missing in the model; both empty if strict.

    Raises:
        CheckpointError: on every rank; names, shapes or dtypes differ, or entries are in no file.
    """
    state = parallel_state(model)
    tensors = dict(named_tensors(model))
    off_stage_names = frozenset() if state is None else state.names.off_stage
    stored_names = [
        name for name in checkpoint.names() if not name.startswith("optimizer/") and name not in off_stage_names
    ]
    missing, surplus = sorted(tensors.keys() - set(stored_names)), sorted(set(stored_names) - tensors.keys())
    matched_tensors = {name: tensors[name] for name in stored_names if name in tensors}
    holdings = {name: parameter_holding(state, name, tensor) for name, tensor in matched_tensors.items()}
    with propagate_errors(f"Loading {checkpoint.path}"):
        if strict and (missing or surplus):
            raise CheckpointError(
                f"{checkpoint.path} is not a checkpoint of this {type(model).__name__}: missing {missing[:5]}, surplus "
                f"{surplus[:5]}."
            )
        for name, tensor in matched_tensors.items():
            checkpoint.check(name, tuple(tensor.shape), tensor.dtype, holdings[name].boxes())
    for name, tensor in matched_tensors.items():
        local = local_tensor(tensor).detach()
        if local.device.type == "cpu" and local.is_contiguous():
            checkpoint.read(name, holdings[name].boxes(), local.view(-1))
        else:
            local.copy_(_read(checkpoint, name, holdings[name], local.shape))
    engine = None if state is None else state.data_parallel
    if engine is not None:
        engine.refresh_main_weights()
        engine.step_status.skipped_steps = int(checkpoint.metadata.get("skipped_steps", 0))
    return missing, surplus


@torch.no_grad()
def load_optimizers(model: Any, optimizers: Sequence[torch.optim.Optimizer], checkpoint: Checkpoint) -> None:
    """Loads the optimizers' states, hyperparameters and main weights from a checkpoint of any layout.

    Raises:
        CheckpointError: on every rank; number or class of optimizers or their groups' parameters differ, or moments
            are in no file.
    """
    described, optimizers = checkpoint.metadata.get("optimizers", []), list_stepping(optimizers)
    with propagate_errors(f"Loading {checkpoint.path}"):
        if len(described) != len(optimizers):
            raise CheckpointError(
                f"{checkpoint.path} holds the state of {len(described)} optimizer(s), this run has {len(optimizers)}."
            )
        for number, (optimizer, description) in enumerate(zip(optimizers, described, strict=True)):
            _check_groups(model, optimizer, description, checkpoint)
            # Checkpoints of earlier versions do not list the expected moments.
            moments: Mapping[str, list[str]] = description.get("moments", {})
            for leaf in _leaves(model, optimizer):
                for key in moments.get(leaf.name, ()):
                    if key == MAIN_WEIGHT or _stores_state(parallel_state(model), leaf):
                        name = _key(number, key, leaf.name)
                        holding = _state_holding(parallel_state(model), leaf, key, checkpoint.shape(name))
                        checkpoint.check(name, holding.shape, checkpoint.dtype(name), holding.boxes())
    for number, (optimizer, description) in enumerate(zip(optimizers, described, strict=True)):
        _load_optimizer(model, optimizer, number, description, checkpoint)


def _check_groups(
    model: Any, optimizer: torch.optim.Optimizer, description: dict[str, Any], checkpoint: Checkpoint
) -> None:
    name = type(optimizer).__name__
    if description["class"] != name:
        raise CheckpointError(f"{checkpoint.path} holds the state of a {description['class']}, this run uses {name}.")
    if description["groups"] is None:
        return
    leaves = iter(_leaves(model, optimizer))
    names = [[next(leaves).name for _ in group] for group in _own_groups(optimizer)]
    state = parallel_state(model)
    off_stage_names = frozenset() if state is None else state.names.off_stage
    saved = [[name for name in group["names"] if name not in off_stage_names] for group in description["groups"]]
    if [sorted(group) for group in names] != [sorted(group) for group in saved]:
        differing = sorted(set(sum(names, [])) ^ set(sum(saved, [])))
        raise CheckpointError(
            f"{checkpoint.path}: the parameter groups of {name} differ from this run's"
            + (f" in {', '.join(differing[:5])}." if differing else " in how parameters are grouped.")
        )


def _load_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, number: int, description: dict[str, Any], checkpoint: Checkpoint
) -> None:
    state = parallel_state(model)
    for group, saved in zip(optimizer.param_groups, description["groups"] or (), strict=bool(description["groups"])):
        group.update(unpack(saved["hyperparameters"], {}))
    keys: dict[str, list[str]] = {}
    prefix = f"optimizer/{number}/"
    for name in checkpoint.names():
        if name.startswith(prefix):
            key, _, parameter = name.removeprefix(prefix).partition("/")
            keys.setdefault(parameter, []).append(key)
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for leaf in _leaves(model, optimizer):
        stores_state = _stores_state(state, leaf)
        moments: dict[str, Tensor] = {}
        for key in keys.get(leaf.name, ()):
            if key != MAIN_WEIGHT and not stores_state:
                continue
            name = _key(number, key, leaf.name)
            holding = _state_holding(state, leaf, key, checkpoint.shape(name))
            is_full = key != MAIN_WEIGHT and leaf.covers_parameter
            shape = torch.Size(holding.shape) if is_full else local_tensor(leaf.tensor).shape
            value = _read(checkpoint, name, holding, shape, optimizer.state.get(leaf.tensor, {}).get(key))
            if key != MAIN_WEIGHT:
                moments[key] = value.to(leaf.tensor.device)
            elif leaf.separate:
                leaf.tensor.copy_(value)
        scalars = description["scalars"].get(leaf.name, {"dict": []}) if stores_state else {"dict": []}
        values = dict(unpack(scalars, moments))
        if on_device:
            values = {key: v.to(leaf.tensor.device) if isinstance(v, Tensor) else v for key, v in values.items()}
        values |= {key: moment for key, moment in moments.items() if not key.startswith(f"{NESTED}.")}
        if values:
            optimizer.state[leaf.tensor] = values
        else:
            optimizer.state.pop(leaf.tensor, None)

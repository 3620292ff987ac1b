"""A model and its optimizers in a sharded checkpoint: written share by share, read in any layout.

| in the checkpoint | what |
|---|---|
| tensor `<name>` | a weight or buffer under its name in the state dict |
| tensor `optimizer/<number>/<key>/<name>` | a moment of that weight; key `main_weight` is its fp32 copy |
| fact `optimizers` | hyperparameters of the groups, names of their parameters, steps |
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data_parallel.optimizer import Leaf, sharded
from ..errors import CheckpointError
from ..parallelize import parallel_state
from ..upstream import local_tensor
from .holdings import Holding, leaf_holding, model_pieces, named_tensors, parameter_holding
from .load import empty_in_huge_pages
from .packing import pack, unpack
from .pieces import Piece
from .reader import Checkpoint

MAIN_WEIGHT = "main_weight"


def _leaves(model: Any, optimizer: torch.optim.Optimizer) -> list[Leaf]:
    """The leaves of a prepared optimizer; of a stock one the parameters themselves."""
    prepared = sharded(optimizer)
    if prepared is not None:
        return prepared.leaves
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [Leaf(names[id(p)], p, 0, local_tensor(p).numel(), p, False, False) for p in parameters]


def _key(number: int, key: str, name: str) -> str:
    return f"optimizer/{number}/{key}/{name}"


def _moments(optimizer: torch.optim.Optimizer, leaf: Leaf) -> dict[str, Tensor]:
    """The state of a leaf that has an entry for each of its own."""
    state = optimizer.state.get(leaf.tensor, {})
    size = local_tensor(leaf.tensor).numel()
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and local_tensor(value).numel() == size
    }


def _scalars(optimizer: torch.optim.Optimizer, leaf: Leaf) -> dict[str, Any]:
    moments = _moments(optimizer, leaf)
    return {key: value for key, value in optimizer.state.get(leaf.tensor, {}).items() if key not in moments}


def optimizer_pieces(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Iterator[Piece]:
    """This rank's share of an optimizer's moments and main weights."""
    state = parallel_state(model)
    for leaf in _leaves(model, optimizer):
        holding = leaf_holding(state, leaf)
        tensors = _moments(optimizer, leaf)
        if leaf.separate and leaf.tensor.dtype != leaf.parameter.dtype:
            tensors = tensors | {MAIN_WEIGHT: leaf.tensor}
        for key, tensor in tensors.items():
            piece = holding.share(_key(number, key, leaf.name), local_tensor(tensor))
            if piece is not None:
                yield piece


def pieces(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Piece]:
    """All that this rank writes."""
    yield from model_pieces(model)
    for number, optimizer in enumerate(optimizers):
        yield from optimizer_pieces(model, optimizer, number)


def write_config(model: Any, directory: Path) -> None:
    """The model's config files, as `save_pretrained` writes them."""
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def facts(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """What the manifest says beside the tensors; collective, since a rank may own nothing of a small parameter."""
    state = parallel_state(model)
    layout = None if state is None else state.config.to_dict()
    described = [_describe(model, optimizer) for optimizer in optimizers]
    skipped = 0 if state is None or state.data_parallel is None else state.data_parallel.skipped_steps
    return {
        "model": {"class": type(model).__name__.removeprefix("FSDP"), "model_type": model.config.model_type},
        "layout": layout,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "optimizers": described,
        "skipped_steps": skipped,
    }


def _describe(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    leaves = iter(_leaves(model, optimizer))
    tensors: dict[str, Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        names = [next(leaves).name for _ in group["params"]]
        hyperparameters = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"names": names, "hyperparameters": pack(hyperparameters, tensors, "group")})
    scalars = {
        leaf.name: pack(values, tensors, leaf.name)
        for leaf in _leaves(model, optimizer)
        if (values := _scalars(optimizer, leaf))
    }
    if tensors:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state that belongs to no single entry of a parameter: "
            f"{', '.join(sorted(tensors)[:3])}. It cannot be read in another layout and is not saved."
        )
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def _read(checkpoint: Checkpoint, name: str, holding: Holding, shape: torch.Size, old: Tensor | None = None) -> Tensor:
    """The entries a rank holds, in CPU memory: that of `old` where they fit it, else their own."""
    dtype = checkpoint.dtype(name)
    usable = old is not None and old.device.type == "cpu" and old.dtype == dtype and old.is_contiguous()
    if usable and old is not None and old.numel() == holding.stop - holding.start:
        out = old.view(-1)
    else:
        out = empty_in_huge_pages(torch.Size([holding.stop - holding.start]), dtype)
    checkpoint.read(name, holding.boxes(), out)
    return out.view(shape)


def _is_weight(name: str) -> bool:
    return not name.startswith("optimizer/")


@torch.no_grad()
def load_model(model: Any, checkpoint: Checkpoint, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Fills a model's weights from a checkpoint of any layout; nothing is modified unless everything fits.

    Returns:
        `tuple`: names that the checkpoint lacks and names the model has not; both empty when strict.

    Raises:
        CheckpointError: names, shapes or dtypes that differ, or entries that no file has.
    """
    state = parallel_state(model)
    tensors = dict(named_tensors(model))
    found = [name for name in checkpoint.names() if _is_weight(name)]
    missing, surplus = sorted(tensors.keys() - set(found)), sorted(set(found) - tensors.keys())
    if strict and (missing or surplus):
        raise CheckpointError(
            f"{checkpoint.path} is not a checkpoint of this {type(model).__name__}: missing {missing[:5]}, surplus "
            f"{surplus[:5]}."
        )
    wanted = {name: tensors[name] for name in found if name in tensors}
    holdings = {name: parameter_holding(state, name, tensor) for name, tensor in wanted.items()}
    for name, tensor in wanted.items():
        checkpoint.check(name, tuple(tensor.shape), tensor.dtype, holdings[name].boxes())
    for name, tensor in wanted.items():
        local = local_tensor(tensor).detach()
        if local.device.type == "cpu" and local.is_contiguous():
            checkpoint.read(name, holdings[name].boxes(), local.view(-1))
        else:
            local.copy_(_read(checkpoint, name, holdings[name], local.shape))
    engine = None if state is None else state.data_parallel
    if engine is not None:
        engine.refresh_main_weights()
        engine.skipped_steps = int(checkpoint.facts.get("skipped_steps", 0))
    return missing, surplus


@torch.no_grad()
def load_optimizers(model: Any, optimizers: Sequence[torch.optim.Optimizer], checkpoint: Checkpoint) -> None:
    """Fills the optimizers' state, hyperparameters and main weights from a checkpoint of any layout.

    Raises:
        CheckpointError: another number or class of optimizers, or other parameters in their groups.
    """
    described = checkpoint.facts.get("optimizers", [])
    if len(described) != len(optimizers):
        raise CheckpointError(
            f"{checkpoint.path} holds the state of {len(described)} optimizer(s), this run has {len(optimizers)}."
        )
    for optimizer, description in zip(optimizers, described, strict=True):
        _check_groups(model, optimizer, description, checkpoint)
    for number, (optimizer, description) in enumerate(zip(optimizers, described, strict=True)):
        _load_optimizer(model, optimizer, number, description, checkpoint)


def _check_groups(
    model: Any, optimizer: torch.optim.Optimizer, description: dict[str, Any], checkpoint: Checkpoint
) -> None:
    name = type(optimizer).__name__
    if description["class"] != name:
        raise CheckpointError(f"{checkpoint.path} holds the state of a {description['class']}, this run uses {name}.")
    leaves = iter(_leaves(model, optimizer))
    names = [[next(leaves).name for _ in group["params"]] for group in optimizer.param_groups]
    saved = [group["names"] for group in description["groups"]]
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
    for group, saved in zip(optimizer.param_groups, description["groups"], strict=True):
        group.update(unpack(saved["hyperparameters"], {}))
    keys = _keys_of(checkpoint, number)
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for leaf in _leaves(model, optimizer):
        holding = leaf_holding(state, leaf)
        values = dict(unpack(description["scalars"].get(leaf.name, {"dict": []}), {}))
        if on_device:
            values = {key: v.to(leaf.tensor.device) if isinstance(v, Tensor) else v for key, v in values.items()}
        for key in keys.get(leaf.name, ()):
            name = _key(number, key, leaf.name)
            old = optimizer.state.get(leaf.tensor, {}).get(key)
            value = _read(checkpoint, name, holding, local_tensor(leaf.tensor).shape, old)
            if key == MAIN_WEIGHT:
                if leaf.separate:
                    leaf.tensor.copy_(value)
                continue
            values[key] = value.to(leaf.tensor.device)
        if values:
            optimizer.state[leaf.tensor] = values
        else:
            optimizer.state.pop(leaf.tensor, None)


def _keys_of(checkpoint: Checkpoint, number: int) -> dict[str, list[str]]:
    """Parameter name -> the keys of its moments."""
    keys: dict[str, list[str]] = {}
    prefix = f"optimizer/{number}/"
    for name in checkpoint.names():
        if name.startswith(prefix):
            key, _, parameter = name.removeprefix(prefix).partition("/")
            keys.setdefault(parameter, []).append(key)
    return keys

"""Coordination of pipeline stages in a save: tensor owners, the list of all tensors, and equality of tied copies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..core.communication.rank_errors import gather, raise_on_all_ranks
from ..core.io.checksums import hash_tensor
from ..core.off_stage import local_named_parameters
from ..errors import CheckpointError
from ..parallel_state import ParallelState, parallel_state


def is_owned(state: ParallelState, name: str) -> bool:
    """Returns whether a weight or buffer belongs to this rank's stages."""
    return state.cut is None or state.cut.owner(name) == state.axes.rank("pp")


@dataclass(frozen=True)
class OwnedTensor:
    """Tensor of the full model.

    Attributes:
        owner: the pipeline rank it belongs to.
        shape: the global shape.
    """

    owner: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def merge_owned_tensors(state: ParallelState, tensors: Mapping[str, Tensor]) -> dict[str, OwnedTensor]:
    """Returns all stages' tensors in the full model's order, from each rank's tensors of any shape; collective."""
    owned_tensors = {
        name: OwnedTensor(state.mesh.pp_rank, tuple(tensor.shape), tensor.dtype)
        for name, tensor in tensors.items()
        if is_owned(state, name)
    }
    return join_stages(state, owned_tensors)


def join_stages(state: ParallelState, local_values: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the stages' dictionaries, keyed by tensor name, in the full model's order; collective."""
    if state.cut is None:
        return dict(local_values)
    merged = {name: value for part in gather_from_stages(state, local_values) for name, value in part.items()}
    return {name: merged[name] for name in in_order(state, merged)}


def gather_from_stages(state: ParallelState, value: Any) -> list[Any]:
    """Gathers a value from each rank of this pipeline."""
    return gather(value, state.mesh.pp_group, "Saving")


def in_order(state: ParallelState, names: Iterable[str]) -> list[str]:
    """Sorts names in the full model's order; names added after loading come last."""
    position = {name: index for index, name in enumerate(state.names.all)}
    return sorted(dict.fromkeys(names), key=lambda name: position.get(name, len(position)))


def resharded(model: nn.Module) -> nn.Module:
    """Reshards the model's weights and returns it: after a forward alone, ZeRO-3 leaves some unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def tied_weights(model: Any) -> dict[str, Tensor]:
    """Returns this rank's parameters, of any shape, that are tied to parameters on the other end of the pipeline."""
    state = parallel_state(model)
    assert state is not None
    if state.cut is None:
        return {}
    held = dict(local_named_parameters(resharded(model)))
    return {name: held[name] for name in state.cut.tied if name in held}


def check_copies(state: ParallelState, tensors: Mapping[str, Tensor]) -> None:
    """Checks that tied tensors of any shape, keyed by the names they are saved under, are equal on both stages.

    Collective; every rank passes its local shards, and gets a `CheckpointError` with the tensors that differ.
    """
    if state.cut is None or not state.cut.tied:
        return
    parts = gather_from_stages(state, {name: hash_tensor(tensor) for name, tensor in tensors.items()})
    holders = [part for part in parts if part]
    names = sorted({name for part in holders for name in part})
    differing = [name for name in names if len({part.get(name) for part in holders}) > 1]
    error = None
    if differing:
        error = CheckpointError(
            f"{', '.join(differing[:5])}: the first and the last pipeline stage hold different copies of tied weights. "
            "Change tied weights on both stages, and modify gradients identically on all ranks."
        )
    raise_on_all_ranks(error, None, "Saving")

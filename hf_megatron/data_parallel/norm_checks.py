"""Whether what the ranks of a pipeline hand over is one list of parameters.

The norm of a list is taken over all ranks at once, and a rank's n-th call is joined with the n-th of every other. Lists
are the same on all of them, with weights of other stages as absent tensors, unless a loop has left those out:

    for name, p in model.named_parameters():
        if "mlp" in name and p.device.index == rank:
            clip_grad_norm_([p], 1.0)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ..core.off_stage import is_off_stage
from ..core.runtime import RUNTIME
from ..errors import UnsupportedError
from ..parallel_state import parallel_state
from .engine import DataParallel, get_engine

if TYPE_CHECKING:
    from ..core.mesh import ParallelMesh


@dataclass(frozen=True)
class ListedShard:
    """What one rank knows of a list, by names.

    Attributes:
        held: trained parameters of this rank that have a gradient.
        own: those of them that are listed.
        off_stage: listed parameters of other stages.
    """

    held: frozenset[str]
    own: frozenset[str]
    off_stage: frozenset[str]


class ListOfRanks:
    """What this rank's parameters, of any shape, are of a list over all ranks.

    Args:
        in_step (`bool`): an optimizer asks for its own parameters, whatever they are.

    Attributes:
        flags: numbers that the ranks add up with the norm; none where no pipeline is concerned.
    """

    def __init__(self, parameters: Sequence[Tensor], *, in_step: bool = False):
        self.parameters, self.in_step = parameters, in_step
        self.engines = list_engines(parameters)
        self.is_complete = bool(self.engines) and has_all(parameters, self.engines)
        concerned = not parameters or any(engine.state.cut is not None for engine in self.engines)
        self.flags: tuple[float, ...] = (
            (not self.is_complete, in_step, not in_step) if concerned and pipelines() else ()
        )

    def judge(self, added: Sequence[float]) -> bool:
        """Returns whether it is all trained parameters of their models, on all ranks.

        Every rank of a pipeline calls it with the flags, added up over all ranks.

        Raises `UnsupportedError` on every rank of a pipeline whose lists cannot be told to be parts of one.
        """
        if not self.flags:
            return self.is_complete
        is_partial, steps, norms = added
        if steps and norms:
            raise _error("some ranks have gone on to the optimizer's step.")
        if not is_partial or self.in_step:
            return not is_partial
        return _compare(_part(self.parameters, self.engines or _all_engines()))


def has_all(parameters: Sequence[Tensor], engines: Sequence[DataParallel]) -> bool:
    """Tells whether parameters of any shape are all that this rank trains of some models."""
    param_ids = {id(parameter) for parameter in parameters}
    return all(id(parameter) in param_ids for engine in engines for parameter in engine.parameters.trained)


def list_engines(parameters: Sequence[Tensor]) -> list[DataParallel]:
    """Lists the engines of the models that parameters of any shape belong to."""
    return list({id(engine): engine for engine in map(get_engine, parameters) if engine is not None}.values())


def joins(parameters: Sequence[Tensor]) -> bool:
    """Tells whether a norm of parameters of any shape is taken over ranks; none at all may be some on other stages."""
    return bool(list_engines(parameters)) or (not parameters and bool(pipelines()))


def pipelines() -> list["ParallelMesh"]:
    """Lists the meshes of this job's pipelines, the same on every rank."""
    return [mesh for mesh in RUNTIME.meshes.values() if mesh.pp_size > 1 and mesh.job is dist.group.WORLD]


def _all_engines() -> list[DataParallel]:
    states = [state for state in map(parallel_state, RUNTIME.models) if state is not None and state.cut is not None]
    return [state.data_parallel for state in states if isinstance(state.data_parallel, DataParallel)]


def _part(parameters: Sequence[Tensor], engines: Sequence[DataParallel]) -> ListedShard:
    param_ids = {id(parameter) for parameter in parameters}
    held, listed, off_stage = set(), set(), set()
    for engine in engines:
        for name, parameter in engine.model.named_parameters():
            if is_off_stage(parameter):
                off_stage |= {name} if id(parameter) in param_ids else set()
            elif parameter.requires_grad and parameter.grad is not None:
                held.add(name)
                listed |= {name} if id(parameter) in param_ids else set()
    return ListedShard(frozenset(held), frozenset(listed), frozenset(off_stage))


def _compare(local_shard: ListedShard) -> bool:
    parts = [local_shard]
    for mesh in pipelines():
        gathered: list[ListedShard] = [local_shard] * mesh.pp_size
        dist.all_gather_object(gathered, local_shard, group=mesh.host_group("pp"))
        parts += gathered
    if all(part.own == part.held for part in parts):
        return True
    for part in parts:
        for other in parts:
            # Both ends hold a tied weight.
            listed, expected = part.off_stage & other.held, other.own - part.held
            if listed != expected:
                raise _error(f"{min(listed ^ expected)} is listed by some ranks and left out by others.")
    return False


def _error(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "clip_grad_norm_ or get_total_norm of some of a pipelined model's parameters has to get the same list on "
        f"every rank: {reason} Take it from model.parameters() or named_parameters(), which list the weights of all "
        "stages."
    )

"""Checks that all pipeline stages pass the same parameter list to a gradient-norm call.

The norm is computed collectively, so the n-th call of a rank is combined with the n-th call of every other rank. The
lists are the same on all ranks, with off-stage tensors for other stages' weights, unless a loop filters them out:

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
from .model_parameters import MARK

if TYPE_CHECKING:
    from ..core.mesh import ParallelMesh


@dataclass(frozen=True)
class ListedShard:
    """One rank's view of a parameter list, by names.

    Attributes:
        held: trained parameters of this rank that have a gradient.
        own: the listed ones of `held`.
        off_stage: listed parameters of other stages.
    """

    held: frozenset[str]
    own: frozenset[str]
    off_stage: frozenset[str]


class ListOfRanks:
    """This rank's parameters, of any shape, of a norm over all ranks.

    Args:
        in_step (`bool`): whether an optimizer step computes the norm of its own parameters, which may be any subset.

    Attributes:
        flags: values that are all-reduced together with the norm: whether the list is partial, whether a step makes the
            call, whether the training loop does. Empty without a pipeline.
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
        """Returns whether the lists of all ranks contain all trained parameters of their models; collective.

        Args:
            added: the flags, summed over all ranks.

        Raises:
            UnsupportedError: on every rank of a pipeline, if the ranks passed different lists or different calls meet.
        """
        if not self.flags:
            return self.is_complete
        is_partial, steps, norms = added
        if steps and norms:
            raise _error("some ranks have already called the optimizer's step.")
        if not is_partial or self.in_step:
            return not is_partial
        return _compare(_part(self.parameters, self.engines or _all_engines()))


def has_all(parameters: Sequence[Tensor], engines: Sequence[DataParallel]) -> bool:
    """Returns whether parameters of any shape include all trained parameters that this rank holds of some models."""
    param_ids = set(map(id, parameters))
    return all(param_ids.issuperset(map(id, engine.parameters.trained)) for engine in engines)


def list_engines(parameters: Sequence[Tensor]) -> list[DataParallel]:
    """Returns the engines of the models that parameters of any shape belong to, each once."""
    found = dict.fromkeys([vars(parameter).get(MARK) or get_engine(parameter) for parameter in parameters])
    return [engine for engine in found if engine is not None]


def joins(parameters: Sequence[Tensor]) -> bool:
    """Returns whether a norm of parameters of any shape is collective; an empty list may have some on other stages."""
    return bool(list_engines(parameters)) or (not parameters and bool(pipelines()))


def pipelines() -> list["ParallelMesh"]:
    """Returns the meshes of this job's pipelines, the same on every rank."""
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
    # Reached only if some rank's list is partial: names are exchanged between the stages then.
    parts = [local_shard]
    for mesh in pipelines():
        gathered: list[ListedShard] = [local_shard] * mesh.pp_size
        dist.all_gather_object(gathered, local_shard, group=mesh.host_group("pp"))
        parts += gathered
    if all(part.own == part.held for part in parts):
        return True
    for part in parts:
        for other in parts:
            # A tied weight is held at both ends: `- part.held` leaves it out, because both list it as their own.
            listed, expected = part.off_stage & other.held, other.own - part.held
            if listed != expected:
                raise _error(f"{min(listed ^ expected)} is listed by some ranks and left out by others.")
    return False


def _error(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "clip_grad_norm_ and get_total_norm of some parameters of a pipelined model need the same list on every "
        f"rank: {reason} Select it from model.parameters() or named_parameters(), which list the weights of all "
        "stages."
    )

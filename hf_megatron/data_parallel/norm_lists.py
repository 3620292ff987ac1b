"""Whether what the ranks of a pipeline hand over are parts of one list of parameters.

The norm of a list is taken over all ranks at once, and a rank's n-th call is joined with the n-th of every other. A
rank cannot know which parameters of other stages a loop would have listed beside its own:

    for name, p in model.named_parameters():      one process: a norm for each weight
        if "mlp" in name:                         two stages: layer 0's joined with layer 1's
            clip_grad_norm_([p], 1.0)

So each rank tells, beside whether its list has everything, by what names it was chosen.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError
from ..parallel_state import parallel_state
from ..patch_ledger import LEDGER
from ..patterns import generic
from .engine import DataParallel, engine_of

if TYPE_CHECKING:
    from ..mesh import ParallelMesh


@dataclass(frozen=True)
class ListedPart:
    """One rank's part of a list.

    Attributes:
        chosen: names in which `*` stands for the layer.
        held: the same of all trained parameters of this rank that have a gradient.
        places: the layers, and modules outside of them, that the list reaches into.
        is_closed: whether it has every parameter of its names.
        is_whole: whether it has every parameter.
    """

    chosen: frozenset[str]
    held: frozenset[str]
    places: frozenset[str]
    is_closed: bool
    is_whole: bool


class ListOfRanks:
    """What this rank's parameters, of any shape, are of a list over all ranks.

    Args:
        in_step (`bool`): an optimizer asks for its own parameters, whatever they are.

    Attributes:
        flags: numbers that the ranks add up with the norm; none where no pipeline is concerned.
    """

    def __init__(self, parameters: Sequence[Tensor], *, in_step: bool = False):
        self.parameters, self.in_step = parameters, in_step
        self.engines = engines_of(parameters)
        self.is_whole = bool(self.engines) and has_all(parameters, self.engines)
        concerned = not parameters or any(engine.state.cut is not None for engine in self.engines)
        self.flags: tuple[float, ...] = (not self.is_whole, in_step, not in_step) if concerned and pipelines() else ()

    def judge(self, added: Sequence[float]) -> bool:
        """Returns whether it is all trained parameters of their models, on all ranks.

        Every rank of a pipeline calls it with the flags, added up over all ranks.

        Raises `UnsupportedError` on every rank of a pipeline whose lists cannot be told to be parts of one.
        """
        if not self.flags:
            return self.is_whole
        is_partial, steps, norms = added
        if steps and norms:
            raise _error("some ranks have gone on to the optimizer's step.")
        if not is_partial or self.in_step:
            return not is_partial
        return _compare(_part(self.parameters, self.engines or _all_engines()))


def has_all(parameters: Sequence[Tensor], engines: Sequence[DataParallel]) -> bool:
    """Tells whether parameters of any shape are all that this rank trains of some models."""
    given = {id(parameter) for parameter in parameters}
    return all(id(parameter) in given for engine in engines for parameter in engine.trained)


def engines_of(parameters: Sequence[Tensor]) -> list[DataParallel]:
    """Lists the engines of the models that parameters of any shape belong to."""
    return list({id(engine): engine for engine in map(engine_of, parameters) if engine is not None}.values())


def joins(parameters: Sequence[Tensor]) -> bool:
    """Tells whether a norm of parameters of any shape is taken over ranks; none at all may be some on other stages."""
    return bool(engines_of(parameters)) or (not parameters and bool(pipelines()))


def pipelines() -> list["ParallelMesh"]:
    """Lists the meshes of this job's pipelines, the same on every rank."""
    return [mesh for mesh in LEDGER.meshes.values() if mesh.pp_size > 1 and mesh.job is dist.group.WORLD]


def has_stages() -> bool:
    """Tells whether a model that is cut into stages still exists, the same on every rank."""
    # A model that was dropped may wait for the cyclic collector.
    gc.collect()
    return bool(_all_engines())


def _all_engines() -> list[DataParallel]:
    states = [state for state in map(parallel_state, LEDGER.models) if state is not None and state.cut is not None]
    return [state.data_parallel for state in states if isinstance(state.data_parallel, DataParallel)]


def _part(parameters: Sequence[Tensor], engines: Sequence[DataParallel]) -> ListedPart:
    given = {id(parameter) for parameter in parameters}
    found = [
        (name, id(p) in given)
        for engine in engines
        for name, p in engine.model.named_parameters()
        if p.requires_grad and p.grad is not None
    ]
    names = [name for name, is_chosen in found if is_chosen]
    chosen = frozenset(map(generic, names))
    return ListedPart(
        chosen,
        frozenset(generic(name) for name, _ in found),
        frozenset(map(_place, names)),
        all(is_chosen for name, is_chosen in found if generic(name) in chosen),
        len(names) == len(found),
    )


def _place(name: str) -> str:
    before, star, _ = generic(name).partition("*")
    return name[: len(before)] + name[len(before) :].partition(".")[0] if star else name.rpartition(".")[0]


def _compare(own: ListedPart) -> bool:
    parts = [own]
    for mesh in pipelines():
        gathered: list[ListedPart] = [own] * mesh.pp_size
        dist.all_gather_object(gathered, own, group=mesh.host_group("pp"))
        parts += gathered
    if all(part.is_whole for part in parts):
        return True
    chosen = frozenset().union(*(part.chosen for part in parts))
    for part in parts:
        if left_out := chosen & part.held - part.chosen:
            raise _error(f"{min(left_out)} is listed by some ranks and left out by others.")
        if not part.is_closed:
            raise _error(f"of several layers' {min(part.chosen)} it has some.")
    if len(frozenset().union(*(part.places for part in parts))) > 1 and all(len(part.places) < 2 for part in parts):
        places = sorted(frozenset().union(*(part.places for part in parts)))
        raise _error(f"it may be one of {places[0]} and another of {places[1]}, or one of both.")
    return False


def _error(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "clip_grad_norm_ or get_total_norm of some of a pipelined model's parameters: it cannot be told which "
        f"parameters of other stages belong to this list: {reason} Hand over all parameters, or lists that have the "
        "same weights of every layer; clip_grad_value_ takes any. Norms of single layers or weights need pp_size=1."
    )

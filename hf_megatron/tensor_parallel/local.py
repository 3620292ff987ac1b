"""Parameters are DTensors at rest and local tensors in flight; this file is the way from one to the other."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..communication.collectives import copy_to_ranks
from ..mesh import ParallelMesh
from ..spec import Placement
from ..upstream import strided_shard


def dtensor_placements(placement: Placement) -> list[Any]:
    """A `Placement` in DTensor's terms; with copies on the two-axis view of tp."""
    if placement.dim is None:
        return [Replicate()]
    split = Shard(placement.dim) if placement.groups == 1 else strided_shard(placement.dim, placement.groups)
    return [split] if placement.copies == 1 else [split, Replicate()]


def local_view(parameter: Tensor | None, group: dist.ProcessGroup | None = None) -> Tensor | None:
    """The differentiable local tensor of a parameter; with `group` its gradient is summed over those ranks."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter.to_local()
    return local if group is None else copy_to_ranks(local, group)


class LocalParameters:
    """Mixin of a module whose own forward, or whose owner's, reads the parameters as plain tensors.

    A dynamic subclass of the module's class gets one property per parameter; `named_parameters()`, `state_dict()` and
    optimizers keep seeing the DTensors. Gradients of the parameters in `summed` are added up over tp.
    """

    mesh: ParallelMesh
    summed: frozenset[str]
    _parameters: dict[str, Tensor]


def _reading(name: str) -> Callable[[LocalParameters], Tensor | None]:
    def read(module: LocalParameters) -> Tensor | None:
        return local_view(module._parameters[name], module.mesh.tp_group if name in module.summed else None)

    return read


@cache
def _local_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    return type(base.__name__, (LocalParameters, base), {name: property(_reading(name)) for name in names})


def read_locally(module: nn.Module, mesh: ParallelMesh, summed: frozenset[str]) -> None:
    """Makes attribute access to the module's own parameters return local tensors."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    module.mesh = mesh  # type: ignore[assignment]
    module.summed = summed  # type: ignore[assignment]
    module.__class__ = _local_class(type(module), names)


@cache
def _mixed_class(base: type[nn.Module], parallel: type[nn.Module], own_forward: bool) -> type[nn.Module]:
    if base in parallel.__mro__:
        return parallel
    bases = (base, parallel) if own_forward else (parallel, base)
    return type(f"Parallel{base.__name__}", bases, {})


def become(module: nn.Module, parallel: type[nn.Module], *, own_forward: bool = False) -> None:
    """Turns `module` into an instance of `parallel`, keeping its attributes, hooks, parameters and `isinstance`.

    `own_forward=True` keeps the forward of a subclass that calls `super().forward()`, as scaled embeddings do.
    """
    module.__class__ = _mixed_class(type(module), parallel, own_forward)

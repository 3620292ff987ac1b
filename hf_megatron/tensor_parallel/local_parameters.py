"""Parameters are DTensors at rest and local tensors in flight; this file is the way from one to the other."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..communication.collectives import copy_to_ranks
from ..mesh import ParallelMesh
from ..upstream import dtensor_local_view as differentiable_local


def local_view(parameter: Tensor | None, group: dist.ProcessGroup | None = None) -> Tensor | None:
    """Returns a parameter's local tensor, of any shape, differentiable; `group` are ranks to sum its gradient over."""
    if not isinstance(parameter, DTensor):
        return parameter
    local = differentiable_local(parameter)
    if group is None:
        return local
    # The compiler takes the view that `to_local` returns for one whose base was changed in place.
    return copy_to_ranks(local.clone() if torch.compiler.is_compiling() else local, group)


class _ShareOfSum(torch.autograd.Function):
    """Divides a replicated addend by the ranks that add it; its gradient is the whole one on each of them."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, ranks: int) -> Tensor:
        return addend / ranks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class LocalParameters:
    """Mixin of a module whose own forward, or whose owner's, reads the parameters as plain tensors.

    A dynamic subclass of the module's class gets one property per parameter; `named_parameters()`, `state_dict()` and
    optimizers keep seeing the DTensors. Gradients of the parameters in `summed` are added up over tp; those in
    `addends` are read as this rank's share, since the results of all ranks are added up.
    """

    mesh: ParallelMesh
    summed: frozenset[str]
    addends: frozenset[str]
    _parameters: dict[str, Tensor]


def _reading(name: str) -> Callable[[LocalParameters], Tensor | None]:
    def read(module: LocalParameters) -> Tensor | None:
        parameter = module._parameters[name]
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names[0].startswith("dp"):  # type: ignore[index]
            # Between forwards FSDP2 asks for the parameter itself.
            return parameter
        value = local_view(parameter, module.mesh.tp_group if name in module.summed else None)
        return _ShareOfSum.apply(value, module.mesh.tp_size) if name in module.addends else value

    return read


@cache
def _local_class(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    return type(base.__name__, (LocalParameters, base), {name: property(_reading(name)) for name in names})


def read_locally(
    module: nn.Module, mesh: ParallelMesh, summed: frozenset[str], addends: frozenset[str] = frozenset()
) -> None:
    """Makes attribute access to the module's own parameters return local tensors."""
    names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    module.mesh = mesh  # type: ignore[assignment]
    module.summed = summed  # type: ignore[assignment]
    module.addends = addends  # type: ignore[assignment]
    module.__class__ = _local_class(type(module), names)  # type: ignore[arg-type]


@cache
def _mixed_class(base: Any, parallel: Any, own_forward: bool) -> type[nn.Module]:
    if base in parallel.__mro__:
        return parallel
    bases = (base, parallel) if own_forward else (parallel, base)
    return type(f"Parallel{base.__name__}", bases, {})


def become(module: nn.Module, parallel: type[nn.Module], *, own_forward: bool = False) -> None:
    """Turns `module` into an instance of `parallel`, keeping its attributes, hooks, parameters and `isinstance`.

    `own_forward=True` keeps the forward of a subclass that calls `super().forward()`, as scaled embeddings do.
    """
    module.__class__ = _mixed_class(type(module), parallel, own_forward)  # type: ignore[arg-type]

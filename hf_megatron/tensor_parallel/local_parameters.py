"""Conversion of parameters, DTensors at rest, to the local tensors that forwards read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.graph_leaves import read_local
from ..compat.shared import Shared
from ..compat.torch_autograd import in_backward, run_function
from ..compat.torch_modules import is_in_compiled_call
from ..compat.transformers_models import get_recorder_attributes
from ..core.communication.collectives import copy_to_ranks
from ..core.communication.mean_grad_ops import scale_gradient
from ..core.forward_hooks import ForwardHooks
from ..core.mesh import ParallelMesh
from ..data_parallel.fsdp_checks import is_sharded
from ..errors import UnsupportedError


def local_view(parameter: Tensor | None, group: dist.ProcessGroup | None = None) -> Tensor | None:
    """Returns a parameter's local tensor, differentiable; `group`, if given, is the ranks to sum its gradient over."""
    if isinstance(parameter, DTensor):
        local = read_local(parameter)
    elif parameter is None or group is None:
        return parameter
    elif torch.compiler.is_dynamo_compiling() or is_in_compiled_call(parameter):
        # Calls of compiled layers hold local views already, also where the compiler runs them eagerly.
        local = parameter
    else:
        # Another module has read it.
        return parameter
    if group is None:
        return local
    # The compiler mistakes the view that `to_local` returns for one whose base was changed in place.
    return copy_to_ranks(local.clone() if torch.compiler.is_dynamo_compiling() else local, group, is_addend=True)


def weight_in_use(module: Any, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the local weight `[out, in]` that a linear multiplies by, with the update of an adapter on it.

    Args:
        group (`ProcessGroup`, *optional*): ranks to sum the gradient of the linear's own weight over.
    """
    # Past `Module.__getattr__`; a parametrized weight (torch.nn.utils.parametrize) is an attribute only.
    parameter = module._parameters.get("weight")
    weight = local_view(module.weight if parameter is None else parameter, group)
    assert weight is not None
    update = getattr(module, "weight_update", None)
    return weight if update is None else update(module.weight, weight)


class _ShareOfSum(torch.autograd.Function):
    """Divides a replicated addend by the number of ranks that add it; its gradient is complete on each of them."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, ranks: int) -> Tensor:
        return addend / ranks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ActiveForwards(Shared):
    """Tracks whether a model is computing, as opposed to its parameters being read from outside."""

    def __init__(self) -> None:
        # Identities of the models that are computing.
        self.models: set[int] = set()
        self._of_modules = 0
        # Description of the user's hook that is running.
        self.in_hook: str | None = None

    def install(self, model: nn.Module, hooks: ForwardHooks) -> None:
        """Counts calls of a model as active forwards."""
        hooks.add_to(model, "active forward", self._enter, self._leave, always_exit=True)

    def track(self, module: nn.Module) -> None:
        """Counts calls of a module inside the model as active forwards.

        A subclass does so, because the compiler guards on the number of each hook that is also called after an error:
        every layer would be compiled by itself.
        """
        if not isinstance(module, LocalParameters | _Tracked):
            module.forwards = self  # type: ignore[assignment]
            module.__class__ = _tracked_class(type(module))  # type: ignore[arg-type, assignment]

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.models.add(id(model))

    def _leave(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.models.discard(id(model))

    def __bool__(self) -> bool:
        # Checkpointed layers are recomputed in backward.
        return bool(self._of_modules or self.models or in_backward())

    def require_full(self, module: nn.Module, name: str | None) -> None:
        """Raises `UnsupportedError` if a module with sharded inputs or outputs (`name` is set) is called outside."""
        # The compiler comes first: a name that it reads would be a guard, different in each layer.
        if not torch.compiler.is_dynamo_compiling() and name is not None and not self:
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) was called outside the model's forward; its input or output is "
                "sharded across ranks. Call the model, or a complete block with sequence_parallel=False, or load the "
                "model with tp_size=1."
            )

    def run(self, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls a module's forward as an active one; without a context manager, which costs six Python calls."""
        self._of_modules += 1
        try:
            return forward(module, *args, **kwargs)
        finally:
            self._of_modules -= 1

    @contextmanager
    def enter_module(self) -> Iterator[None]:
        """Marks a module's own call as active inside the context."""
        self._of_modules += 1
        try:
            yield
        finally:
            self._of_modules -= 1


class _Tracked:
    """Mixin of a module whose calls are active forwards."""


@cache
def _tracked_class(base: Any) -> type[nn.Module]:
    @wraps(base.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or module.forwards.models:
            return base.forward(module, *args, **kwargs)
        return module.forwards.run(base.forward, module, args, kwargs)

    return type(base.__name__, (_Tracked, base), {**get_recorder_attributes(base), "forward": forward})


class LocalParameters:
    """Mixin of a module whose forward, or whose owner's forward, reads the parameters as plain tensors.

    A dynamic subclass of the module's class gets one property per parameter, which is local while the model or the
    module computes; `named_parameters()`, `state_dict()`, optimizers and loops see the DTensors. Gradients of the
    parameters in `summed` are all-reduced over tp; those in `addends` are read divided by tp, since the results of all
    ranks are summed. All gradients of forwards are multiplied by `gradient_factor`.
    """

    mesh: ParallelMesh
    forwards: ActiveForwards
    # Its name, if it takes or returns sharded tensors.
    shard_name: str | None = None
    summed: frozenset[str]
    addends: frozenset[str]
    gradient_factor: float = 1.0
    # Whether FSDP2 may shard the parameters between forwards (ZeRO stage 3).
    shards_weights: bool = True
    # Parameter -> function of its local tensor that forwards read instead, such as adding an adapter's delta.
    changed: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({})
    _parameters: dict[str, Tensor]


def is_split_parameter(parameter: Any) -> bool:
    """Returns whether a parameter is sharded at rest."""
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def _reading(name: str) -> Callable[[LocalParameters], Tensor | None]:
    def read(module: LocalParameters) -> Tensor | None:
        if name not in module._parameters:
            raise UnsupportedError(
                f"{name} of a {type(module).__name__} is no longer a parameter (torch.nn.utils.parametrize); the "
                "parametrized value would not be sharded like it. Change the weight itself, or train with tp_size=1."
            )
        parameter = module._parameters[name]
        if module.shards_weights and is_sharded(parameter):
            # FSDP2 reads the parameter itself between forwards.
            return parameter
        forwards = module.forwards
        # `models` first: the answer in nearly every read, without a call.
        if not (torch.compiler.is_dynamo_compiling() or forwards.models or forwards):
            return parameter
        if forwards.in_hook is not None and (name in module.summed or is_split_parameter(parameter)):
            raise UnsupportedError(
                f"{forwards.in_hook} reads {name} of a {type(module).__name__}: during the forward it is this "
                "rank's shard, or its gradient is summed over ranks. Read it before the forward, or use tp_size=1."
            )
        # Local shard, any shape; a replicated parameter used on sharded activations gets its gradient all-reduced.
        if name in module.summed or not isinstance(parameter, DTensor):
            value = local_view(parameter, module.mesh.tp_group if name in module.summed else None)
        else:
            value = read_local(parameter)
        value = run_function(_ShareOfSum, value, module.mesh.tp_size) if name in module.addends else value
        if value is not None and module.gradient_factor != 1:
            value = scale_gradient(value, module.gradient_factor)
        return value if value is None or name not in module.changed else module.changed[name](value)

    return read


@cache
def _local_class(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    @wraps(base.forward)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return base.forward(module, *args, **kwargs)
        # Calling a module directly is an active forward of that module, too.
        forwards = module.forwards
        # Inside the model's forward there is nothing to check or to count.
        if forwards.models:
            return base.forward(module, *args, **kwargs)
        if module.shard_name is not None:
            forwards.require_full(module, module.shard_name)
        return forwards.run(base.forward, module, args, kwargs)

    properties = {name: property(_reading(name)) for name in names}
    return type(
        base.__name__, (LocalParameters, base), {**get_recorder_attributes(base), "forward": forward, **properties}
    )


def read_locally(
    module: nn.Module,
    mesh: ParallelMesh,
    forwards: ActiveForwards,
    summed: frozenset[str],
    addends: frozenset[str] = frozenset(),
    names: tuple[str, ...] = (),
    *,
    shards_weights: bool = True,
) -> None:
    """Replaces attribute access to a module's parameters (by default all) by their local tensors in forwards."""
    names = names or tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    module.mesh, module.forwards = mesh, forwards  # type: ignore[assignment]
    module.summed = summed  # type: ignore[assignment]
    module.addends = addends  # type: ignore[assignment]
    module.shards_weights = shards_weights  # type: ignore[assignment]
    module.__class__ = _local_class(type(module), names)  # type: ignore[arg-type]


@cache
def _mixed_class(base: Any, parallel: Any, own_forward: bool) -> type[nn.Module]:
    if base in parallel.__mro__:
        return parallel
    bases = (base, parallel) if own_forward else (parallel, base)
    return type(f"Parallel{base.__name__}", bases, {})


def swap_class(module: nn.Module, parallel: type[nn.Module], *, own_forward: bool = False) -> None:
    """Turns `module` into an instance of `parallel`; its attributes, hooks, parameters and `isinstance` are kept.

    `own_forward=True` keeps the forward of a subclass that calls `super().forward()`, as scaled embeddings do.
    """
    module.__class__ = _mixed_class(type(module), parallel, own_forward)  # type: ignore[arg-type]

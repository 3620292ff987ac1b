"""Stage 3: FSDP2 shards the weights themselves over the data parallel ranks, layer by layer.

Everything is split along dim 0 of the tp-local tensor, as FSDP2 does by default. torch's own arithmetic for a dim that
tp and FSDP2 both split goes wrong for many uneven sizes (`DTensor.full_tensor` and DCP; forward and backward are
right), so nothing here or in checkpoints asks DTensor: `full_local` puts the ranks' parts together.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..compat.torch_autograd import inherit_forward, run_after_backward
from ..compat.torch_dtensor import local_tensor
from ..compat.torch_fsdp import fill_missing_gradients
from ..core.axes import Axes
from ..core.communication.bucket_collectives import AllGather, ReduceScatter
from ..core.communication.collectives import all_gather, bounds
from ..core.mesh import ParallelMesh
from ..parallel_state import ParallelState


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """Lists the members of the model's layer lists, without those inside another one."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if isinstance(module, nn.ModuleList) and not inside:
            prefix = f"{name}." if name else ""
            layers.update({f"{prefix}{index}": layer for index, layer in module.named_children()})
    return list(layers.values())


def shard_weights(model: Any, state: ParallelState, around_layers: Sequence[nn.Module] = ()) -> None:
    """Makes every layer, and the model around them, an FSDP2 unit over the dp ranks, experts over those with the same.

    Args:
        around_layers: modules that are units of their own, because the model around them is not called as often.
    """
    mesh = state.mesh
    axes = mesh.weight_shards()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if state.config.fp32_main_params else None)
    marks = {name: vars(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    units = [layer for layer in outermost_layers(model) if next(layer.parameters(), None) is not None]
    tied = _tied_parameters(model) if around_layers else []
    unused = UnusedGradients()
    modules = dict(model.named_modules())
    for name in state.shared_apart:
        if name in modules:
            first = f"{name}.{next(iter(dict(modules[name].named_parameters())))}"
            shards = mesh.expert_shards(state.placement(first))
            _make_unit(modules[name], shards.get_group(), unused, mesh=shards, mp_policy=policy)
    for unit in units:
        _make_unit(unit, mesh.group("dp_cp_shard"), unused, mesh=axes, mp_policy=policy)
    for unit in around_layers:
        # The loss reads a vocab-parallel head after its forward, and backward never tells an embedding, whose inputs
        # have no gradient, that it is over: the caller splits these weights again with `reshard`.
        _make_unit(unit, mesh.group("dp_cp_shard"), unused, mesh=axes, mp_policy=policy, reshard_after_forward=False)
        unit.set_reshard_after_backward(False)  # type: ignore[operator]
    for (owner, name), (other, other_name) in tied:
        # FSDP2 ties what lies inside one unit only.
        owner._parameters[name] = other._parameters[other_name]
    shared = {owner._parameters[name] for (owner, name), _ in tied}
    # Split again after forward, unlike FSDP2's default for a root: between forward and backward a loop finds the same
    # parameters as at any other time, to clear, to edit, and to compute terms of its loss from.
    _make_unit(
        model,
        mesh.group("dp_cp_shard"),
        unused,
        mesh=axes,
        mp_policy=policy,
        ignored_params=shared,
        reshard_after_forward=True,
    )
    # FSDP2 makes new parameters, which have to say that they are initialized, as the old ones did.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).update(marks[name])


class UnusedGradients:
    """Gradients of weights that this rank's backward has not reached, and others' may have: a branch that rows decide.

    In the reduction they are -0.0, which adds nothing to what others have, and stays if nobody has any.
    """

    def __init__(self) -> None:
        self._filled: list[nn.Parameter] = []

    def watch(self, unit: Any) -> None:
        """Has a unit reduce them."""
        fill_missing_gradients(unit, lambda weight: torch.full_like(weight, -0.0), self._note)

    def _note(self, parameter: nn.Parameter) -> None:
        # Each time: a backward that failed has left others here.
        run_after_backward(self._clear)
        self._filled.append(parameter)

    def _clear(self) -> None:
        # FSDP2's own work at the end of the backward was queued before.
        filled, self._filled = self._filled, []
        parts = [None if parameter.grad is None else local_tensor(parameter.grad) for parameter in filled]
        unused = [part is not None and bool(((part == 0) & part.signbit()).all()) for part in parts]
        for parameter, is_unused in zip(filled, unused, strict=True):
            if is_unused:
                parameter.grad = None


def _make_unit(module: Any, group: dist.ProcessGroup, unused: UnusedGradients, **options: Any) -> None:
    fully_shard(module, **options)
    inherit_forward(type(module))
    unused.watch(module)
    if dist.get_world_size(group) > 1 and dist.get_backend(group) == "gloo":
        module.set_custom_all_gather(PairwiseAllGather())
        module.set_custom_reduce_scatter(PairwiseReduceScatter())


_Place = tuple[nn.Module, str]


def _tied_parameters(model: nn.Module) -> list[tuple[_Place, _Place]]:
    """Pairs of places that hold the same parameter, the first and the last one in the model's order."""
    places: dict[int, list[_Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [(param_places[0], param_places[-1]) for param_places in places.values() if len(param_places) > 1]


class _Memory:
    """Where FSDP2 puts what it communicates."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class PairwiseAllGather(_Memory):
    """FSDP2's all-gather over gloo, which sends and receives at several times the speed of its collectives."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        rows = output_tensor.view(dist.get_world_size(group), -1)
        local_row = rows[dist.get_rank(group)]
        if local_row.data_ptr() != input_tensor.data_ptr():
            local_row.copy_(input_tensor.view(-1))
        AllGather(rows, group).wait()


class PairwiseReduceScatter(_Memory):
    """FSDP2's reduce-scatter over gloo."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks = dist.get_world_size(group)
        rows = input_tensor.view(ranks, -1)
        recv_buffer = rows.new_empty((ranks - 1, rows.shape[1]))
        total = ReduceScatter(rows, recv_buffer, group).wait()
        output_tensor.copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)


def reshard(units: Iterable[Any]) -> None:
    """Splits the weights of units again that a batch needed whole."""
    for unit in units:
        unit.reshard()


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Keeps gradients of backwards inside whole on each rank; the next backward outside reduces them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def full_local(tensor: Tensor, shape: tuple[int, ...], mesh: ParallelMesh, average: str = "dp_cp") -> Tensor:
    """Joins a rank's part of a parameter as it was before the dp ranks split it; all of the shard group call it.

    Args:
        tensor: a weight, or a gradient or moment of its shape, as FSDP2 holds it.
        shape: of the part, `[rows, ...]`.
        average (`str`, defaults to `"dp_cp"`): the axis whose ranks average its gradient (`GradientRule`).
    """
    part = local_tensor(tensor).detach()
    return all_gather(part, 0, shape[0], mesh.group(f"{average}_shard")) if shape else part


def owned_rows(shape: tuple[int, ...], axes: Axes, average: str = "dp_cp") -> tuple[int, int]:
    """Returns the `[start, stop)` of dim 0 of a part that this rank of an axis holds (`torch.chunk`'s rule)."""
    shard = f"{average}_shard"
    return bounds(shape[0], axes.size(shard), axes.rank(shard)) if shape else (0, 1)

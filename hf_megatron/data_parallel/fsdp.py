"""ZeRO stage 3: FSDP2 shards the weights over the data-parallel ranks, layer by layer.

Weights are sharded along dim 0 of the tp-local tensor, FSDP2's default. If tp and FSDP2 both shard a dim, DTensor
computes wrong offsets for many uneven sizes (`DTensor.full_tensor` and DCP; forward and backward are right). Neither
this module nor checkpoints use them: `full_local` gathers the shards.
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
from ..compat.torch_fsdp import fill_missing_gradients, keep_class_name
from ..core.axes import Axes
from ..core.communication.bucket_collectives import AllGather, ReduceScatter
from ..core.communication.collectives import all_gather, bounds
from ..core.mesh import ParallelMesh
from ..parallel_state import ParallelState


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the members of the model's `ModuleList`s that are not inside another `ModuleList`."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if isinstance(module, nn.ModuleList) and not inside:
            prefix = f"{name}." if name else ""
            layers.update({f"{prefix}{index}": layer for index, layer in module.named_children()})
    return list(layers.values())


def shard_weights(model: Any, state: ParallelState, around_layers: Sequence[nn.Module] = ()) -> None:
    """Wraps every layer and the model itself as FSDP2 units over the dp ranks; experts over the ranks that share them.

    Args:
        around_layers: modules before and after the layers of a pipeline stage. They become separate units, because the
            model around them is called once per batch, not once per microbatch.
    """
    mesh = state.mesh
    axes = mesh.weight_shards()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if state.config.fp32_main_params else None)
    marks = {name: vars(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    units = [layer for layer in outermost_layers(model) if next(layer.parameters(), None) is not None]
    tied = _tied_parameters(model) if around_layers else []
    unused = UnusedGradients()
    # Expert weights are averaged over other ranks than the rest of their layer, so they are units inside it.
    modules = dict(model.named_modules())
    for name in state.shared_apart:
        if name in modules:
            first = f"{name}.{next(iter(dict(modules[name].named_parameters())))}"
            shards = mesh.expert_shards(state.placement(first))
            _make_unit(modules[name], shards.get_group(), unused, mesh=shards, mp_policy=policy)
    for unit in units:
        _make_unit(unit, mesh.group("dp_cp_shard"), unused, mesh=axes, mp_policy=policy)
    for unit in around_layers:
        # The loss reads a vocab-parallel head after the head's forward, and FSDP2's post-backward hook never runs for
        # an embedding, whose inputs have no gradient: the caller reshards these units with `reshard`.
        _make_unit(unit, mesh.group("dp_cp_shard"), unused, mesh=axes, mp_policy=policy, reshard_after_forward=False)
        unit.set_reshard_after_backward(False)  # type: ignore[operator]
    for (owner, name), (other, other_name) in tied:
        # FSDP2 keeps ties within one unit only: restore those across units.
        owner._parameters[name] = other._parameters[other_name]
    shared = {owner._parameters[name] for (owner, name), _ in tied}
    # Reshard after forward, unlike FSDP2's default for a root module: between forward and backward, training loops find
    # the same parameters as at any other time, to clear, to edit, and to compute loss terms from.
    _make_unit(
        model,
        mesh.group("dp_cp_shard"),
        unused,
        mesh=axes,
        mp_policy=policy,
        ignored_params=shared,
        reshard_after_forward=True,
    )
    keep_class_name(model)
    # FSDP2 creates new parameters: copy attributes of the old ones, such as transformers' "is initialized" mark.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        vars(parameter).update(marks[name])


class UnusedGradients:
    """Gradients of weights that only other ranks' backwards may have reached, such as data-dependent branches.

    They enter the reduction as -0.0, which does not change the other ranks' sum. The result is -0.0 in all entries only
    if no rank has a gradient; `.grad` is set to `None` then, as in the single-process run.
    """

    def __init__(self) -> None:
        self._filled: list[nn.Parameter] = []

    def watch(self, unit: Any) -> None:
        """Registers a unit, whose reduction then includes missing gradients."""
        fill_missing_gradients(unit, lambda weight: torch.full_like(weight, -0.0), self._note)

    def _note(self, parameter: nn.Parameter) -> None:
        # Queued each time: a backward that failed may have left entries without a callback.
        run_after_backward(self._clear)
        self._filled.append(parameter)

    def _clear(self) -> None:
        # FSDP2's own end-of-backward callback was queued earlier, so its reductions are complete here.
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
    """Returns pairs of places that hold the same parameter: the first and the last one in the model's order."""
    places: dict[int, list[_Place]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [(param_places[0], param_places[-1]) for param_places in places.values() if len(param_places) > 1]


class _Memory:
    """Allocator of FSDP2's communication buffers."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class PairwiseAllGather(_Memory):
    """FSDP2's all-gather on gloo, by point-to-point messages, which are several times as fast as its collective."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        # `[ranks, width]`: one segment per rank; this rank fills its own.
        rows = output_tensor.view(dist.get_world_size(group), -1)
        local_row = rows[dist.get_rank(group)]
        if local_row.data_ptr() != input_tensor.data_ptr():
            local_row.copy_(input_tensor.view(-1))
        AllGather(rows, group).wait()


class PairwiseReduceScatter(_Memory):
    """FSDP2's reduce-scatter on gloo, by point-to-point messages."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks = dist.get_world_size(group)
        # `[ranks, width]` -> `[width]`: row r of every rank is summed on rank r.
        rows = input_tensor.view(ranks, -1)
        recv_buffer = rows.new_empty((ranks - 1, rows.shape[1]))
        total = ReduceScatter(rows, recv_buffer, group).wait()
        output_tensor.copy_(total.div_(ranks) if op == dist.ReduceOp.AVG else total)


def reshard(units: Iterable[Any]) -> None:
    """Reshards units that were unsharded for a batch."""
    for unit in units:
        unit.reshard()


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Accumulates unsharded gradients of backwards inside; the next backward outside reduces them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def full_local(tensor: Tensor, shape: tuple[int, ...], mesh: ParallelMesh, average: str = "dp_cp") -> Tensor:
    """All-gathers the FSDP2 shards of a tensor along dim 0; collective over the shard group.

    Args:
        tensor: a weight, or a gradient or moment of its shape, as FSDP2 holds it: `[owned rows, ...]`.
        shape: shape `[rows, ...]` of the result, the tp-local tensor.
        average (`str`, defaults to `"dp_cp"`): the axis whose ranks average its gradient (`GradientRule`).
    """
    part = local_tensor(tensor).detach()
    return all_gather(part, 0, shape[0], mesh.group(f"{average}_shard")) if shape else part


def owned_rows(shape: tuple[int, ...], axes: Axes, average: str = "dp_cp") -> tuple[int, int]:
    """Returns the `[start, stop)` along dim 0 of a tp-local tensor of `shape` that FSDP2 leaves on this rank.

    FSDP2 shards by the rule of `torch.chunk`.
    """
    shard = f"{average}_shard"
    return bounds(shape[0], axes.size(shard), axes.rank(shard)) if shape else (0, 1)

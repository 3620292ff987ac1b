"""Layer-wise steps: an optimizer that needs full parameters (Muon, Adafactor) updates each of them on one rank.

As in Megatron-Core's layer-wise distributed optimizer, the parameters and their optimizer states are distributed over
the ranks, one parameter at a time. Here the ranks are all that hold shards, tensor- and expert-parallel ranks too.
Before a step they send their shards of gradients and main params to the rank that updates the parameter (its owner),
and get the updated shards back: one all-to-all in each direction for all parameters of a dtype.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.axes import Axes, Axis
from ..core.placement import Placement
from .buckets import owned_range
from .fsdp import owned_rows
from .full_params import FullParam, Shard, list_shards
from .main_params import MainParam

# For each rank of the stage: main params and shards, in the order in which they are exchanged.
_Plan = tuple[list[list[tuple[MainParam, Shard]]], list[list[tuple[MainParam, Shard]]]]


class LayerWiseStep:
    """Full parameters of one optimizer, and the exchange of their shards around its steps.

    Args:
        engine (`DataParallel`): engine of the model.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.mesh, self.axes = engine.mesh, engine.state.axes
        # Every rank of the job takes part in creating the group, also on a stage without parameters.
        self._group: dist.ProcessGroup = self.mesh.group("stage")
        self._ranks = dist.get_process_group_ranks(self._group)
        self._leaves: list[MainParam] = []
        # The main params that take part in the present step, and what is derived from them.
        self._used: list[MainParam] = []
        self._plans: dict[tuple[torch.dtype, bool], _Plan] = {}
        # Ranks that share parameters -> number of entries that each of them updates.
        self._loads: dict[Axis, list[int]] = {}

    def add(self, leaves: Sequence[MainParam]) -> None:
        """Chooses the ranks that update parameters, and sets `full` of main params that are shards.

        The largest parameters are assigned first, each to the rank with the fewest entries.
        """
        for leaf in sorted(leaves, key=lambda leaf: -leaf.parameter.numel()):
            axis = self._sharding_axis(leaf)
            if axis.size == 1 or not leaf.parameter.numel():
                continue
            loads = self._loads.setdefault(axis, [0] * axis.size)
            position = loads.index(min(loads))
            loads[position] += leaf.parameter.numel()
            ranks = axis.ranks(self.axes.world_rank)
            is_owner = ranks[position] == self.axes.world_rank
            tensor = leaf.tensor.new_empty(leaf.parameter.shape if is_owner else (0,))
            tensor.untyped_storage().resize_(0)
            all_axes = [self.axes.of_rank(rank) for rank in ranks]
            ranges = [self._range(leaf, axes) for axes in all_axes]
            described = list_shards(leaf.parameter.shape, self._placement(leaf), all_axes, ranges)
            leaf.full = FullParam(axis, ranks[position], *described, tensor)
        self._leaves.extend(leaf for leaf in leaves if leaf.full is not None)

    def _placement(self, leaf: MainParam) -> Placement:
        sharding = self.engine.parameters.sharding(leaf.parameter)
        return Placement() if sharding is None else sharding.placement.on(self.axes)

    def _shard_axis(self, leaf: MainParam) -> str:
        sharding = self.engine.parameters.sharding(leaf.parameter)
        return "dp_shard" if sharding is None else f"{sharding.gradient.average}_shard"

    def _sharding_axis(self, leaf: MainParam) -> Axis:
        """Returns the ranks that together hold all entries of a parameter's main params."""
        axis = self._placement(leaf).split_over(self.axes)
        is_sharded = leaf.flat or self.engine.state.shards(leaf.name)
        return axis.joined(self.axes[self._shard_axis(leaf)]) if is_sharded else axis

    def _range(self, leaf: MainParam, axes: Axes) -> tuple[int, int]:
        """Returns the entries of a rank's flattened local parameter that its main param holds."""
        shape, shard = self._placement(leaf).local_shape(leaf.parameter.shape, axes), self._shard_axis(leaf)
        if self.engine.state.shards(leaf.name):
            # ZeRO stage 3 shards along dim 0.
            row = torch.Size(shape[1:]).numel()
            first, last = owned_rows(shape, axes, shard.removesuffix("_shard"))
            return first * row, last * row
        entries = torch.Size(shape).numel()
        return owned_range(entries, axes.size(shard), axes.rank(shard)) if leaf.flat else (0, entries)

    @torch.no_grad()
    def gather(self) -> None:
        """Fills the full parameters and their gradients on their owners; collective over the ranks of the stage."""
        used = self._find_used()
        if [id(leaf) for leaf in used] != [id(leaf) for leaf in self._used]:
            self._used, self._plans = used, {}
        for leaf in self._used:
            if leaf.tensor.grad is None:
                leaf.tensor.grad = torch.zeros_like(leaf.tensor)
        for leaves in self._by_dtype():
            sent, expected = self._plan(leaves, updated=False)
            tensors = [
                [flat for leaf, _ in pairs for flat in (leaf.tensor.reshape(-1), _gradient(leaf).reshape(-1))]
                for pairs in sent
            ]
            sizes = [[shard.size for _, shard in pairs for _ in range(2)] for pairs in expected]
            received = self._exchange(tensors, sizes, leaves[0].tensor.dtype)
            weights: dict[int, list[tuple[Shard, Tensor]]] = {}
            gradients: dict[int, list[tuple[Shard, Tensor]]] = {}
            for pairs, parts in zip(expected, received, strict=True):
                for (leaf, shard), weight, gradient in zip(pairs, parts[::2], parts[1::2], strict=True):
                    weights.setdefault(id(leaf), []).append((shard, weight))
                    gradients.setdefault(id(leaf), []).append((shard, gradient))
            for leaf in leaves:
                if leaf.full is not None and self._owns(leaf):
                    leaf.full.allocate()
                    leaf.full.fill(leaf.full.tensor, weights[id(leaf)])
                    leaf.full.fill(_gradient(leaf.full), gradients[id(leaf)])

    @torch.no_grad()
    def scatter(self) -> None:
        """Copies the updated parameters from their owners into the main params; collective as `gather`."""
        for leaves in self._by_dtype():
            expected, sent = self._plan(leaves, updated=True)
            entries = {
                (id(leaf), shard.rank): entries
                for leaf in leaves
                if leaf.full is not None and self._owns(leaf)
                for shard, entries in leaf.full.split()
            }
            for leaf in leaves:
                if leaf.full is not None and self._owns(leaf):
                    leaf.full.free()
            tensors = [[entries.pop((id(leaf), shard.rank)) for leaf, shard in pairs] for pairs in sent]
            sizes = [[shard.size for _, shard in pairs] for pairs in expected]
            received = self._exchange(tensors, sizes, leaves[0].tensor.dtype)
            for pairs, parts in zip(expected, received, strict=True):
                for (leaf, _), part in zip(pairs, parts, strict=True):
                    leaf.tensor.copy_(part.view(leaf.tensor.shape))

    def _find_used(self) -> list[MainParam]:
        """Returns the main params whose parameter has a gradient on any rank."""
        if not self._leaves:
            return []
        flags = [int(leaf.tensor.grad is not None) for leaf in self._leaves]
        used = torch.tensor(flags, dtype=torch.int32, device=self.mesh.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        return [leaf for leaf, is_used in zip(self._leaves, used.tolist(), strict=True) if is_used]

    def _by_dtype(self) -> list[list[MainParam]]:
        by_dtype: dict[torch.dtype, list[MainParam]] = {}
        for leaf in self._used:
            by_dtype.setdefault(leaf.tensor.dtype, []).append(leaf)
        return list(by_dtype.values())

    def _owns(self, leaf: MainParam) -> bool:
        return leaf.full is not None and leaf.full.owner == self.axes.world_rank

    def _plan(self, leaves: Sequence[MainParam], *, updated: bool) -> _Plan:
        """Returns this rank's shards by the rank that owns them, and the shards that this rank owns by their rank.

        Args:
            updated (`bool`): whether copies of a shard are listed, which only get the update.
        """
        key = leaves[0].tensor.dtype, updated
        if key in self._plans:
            return self._plans[key]
        held: dict[int, list[tuple[MainParam, Shard]]] = {rank: [] for rank in self._ranks}
        owned: dict[int, list[tuple[MainParam, Shard]]] = {rank: [] for rank in self._ranks}
        for leaf in leaves:
            assert leaf.full is not None
            for shard in leaf.full.shards:
                if shard.is_copy and not updated:
                    continue
                if shard.rank == self.axes.world_rank:
                    held[leaf.full.owner].append((leaf, shard))
                if self._owns(leaf):
                    owned[shard.rank].append((leaf, shard))
        self._plans[key] = list(held.values()), list(owned.values())
        return self._plans[key]

    def _exchange(self, tensors: list[list[Tensor]], sizes: list[list[int]], dtype: torch.dtype) -> list[list[Tensor]]:
        """Sends flat tensors to each rank of the stage, and returns the received ones, of these sizes."""
        device = self.mesh.device
        flat = [tensor.to(device) for to_rank in tensors for tensor in to_rank]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        received = torch.empty(sum(map(sum, sizes)), dtype=dtype, device=device)
        # As bytes: not every backend exchanges half precision.
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [sum(from_rank) * dtype.itemsize for from_rank in sizes],
            [sum(tensor.numel() for tensor in to_rank) * dtype.itemsize for to_rank in tensors],
            group=self._group,
        )
        parts = iter(received.split([size for from_rank in sizes for size in from_rank]))
        return [[next(parts) for _ in from_rank] for from_rank in sizes]


def _gradient(holder: Any) -> Tensor:
    gradient: Tensor | None = holder.tensor.grad
    assert gradient is not None
    return gradient

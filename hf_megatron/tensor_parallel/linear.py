"""Column- and row-parallel linears. `in_features` and `out_features` stay global, the parameters are DTensors.

Source of the scheme: Megatron-LM, `megatron/core/tensor_parallel/layers.py`.
"""

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.graph_leaves import read_local
from ..core.communication.collectives import copy_to_ranks, gather_from_ranks, reduce_from_ranks, split_over_ranks
from ..core.communication.rng import TensorParallelRng
from ..core.mesh import ParallelMesh
from .local_parameters import ActiveForwards, local_view, weight_in_use
from .region import UniformRegion


class ParallelLinear(nn.Linear):
    """Base class of the parallel linears.

    `weight_dim_out` is the weight's output dim: 0 in `nn.Linear`, 1 in transformers' `Conv1D`. With `copies` > 1 that
    many neighboring ranks hold the same shard and sum its gradient.
    """

    mesh: ParallelMesh
    rng: TensorParallelRng
    forwards: ActiveForwards
    # Its name, if it takes or returns sharded tensors.
    shard_name: str | None = None
    region: UniformRegion | None = None
    copies: int = 1
    sum_bias_gradient: bool = False
    weight_dim_out: int = 0
    # (weight at rest, local weight) -> local weight `[out, in]` with the update of an adapter.
    weight_update: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.tp_group

    @property
    def copies_group(self) -> dist.ProcessGroup | None:
        return self.mesh.copies_group(self.copies) if self.copies > 1 else None

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies `[..., local in]` by this rank's shard of the weight: `[..., local out]`."""
        # Inside the model's forward there is nothing to check.
        if not self.forwards.models:
            self.forwards.require_full(self, self.shard_name)
        parameter = self._parameters.get("weight")
        if isinstance(parameter, DTensor) and self.copies == 1 and self.weight_update is None:
            # The usual case, with one call for each of the seven linears of a layer.
            weight = read_local(parameter)
        else:
            # Key/value heads fewer than ranks: the gradient is summed over the ranks that hold the same heads.
            weight = weight_in_use(self, self.copies_group)
        return F.linear(x, weight.t() if self.weight_dim_out == 1 else weight, bias)

    def local_bias(self, group: dist.ProcessGroup | None) -> Tensor | None:
        """Returns this rank's bias `[local out]`, differentiable; `group` is the ranks to sum its gradient over."""
        return None if self.bias is None else local_view(self.bias, group)


class ColumnParallelLinear(ParallelLinear):
    """Column-parallel linear: output features are split, `[..., in_features]` -> `[..., out_features / tp]`.

    With `gather_output` the output is `[..., out_features]` on every rank.
    """

    gather_output: bool = False

    def forward(self, x: Tensor) -> Tensor:
        region = self.region
        # Most linears have none, which `Module.__getattr__` would look up.
        bias = None if self._parameters.get("bias", self) is None else self.local_bias(self.copies_group)
        if region is None:
            # Input replicated on all ranks; its gradient is partial on each, hence all-reduced.
            y = self.matmul(copy_to_ranks(x, self.group), bias)
        elif region.gathered is None:
            # The region has copied or gathered the input once for all column-parallel linears of the block.
            y = self.matmul(x, bias)
        else:
            # Saves the shard of a gathered input for backward.
            y = region.gathered.run(self.matmul, x, bias)
        if self.gather_output:
            # [..., out_features / tp] -> [..., out_features]
            return gather_from_ranks(y, -1, self.out_features, self.group)
        if not self.rng.is_idle and self.training:
            # The output differs between ranks: dropout until the row-parallel linear draws from the local RNG state.
            self.rng.use_local_rng()
        return y


class RowParallelLinear(ParallelLinear):
    """Row-parallel linear: input features are split, `[..., in_features / tp]` -> `[..., out_features]`, all-reduced.

    With `split_input` the input is `[..., in_features]` on every rank. The bias is added once, after the reduction.
    """

    split_input: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.split_input:
            # [..., in_features] -> [..., in_features / tp]
            x = split_over_ranks(x, -1, self.group)
        if self.region is None:
            # Partial sum over this rank's input features, [..., out_features], then all-reduced.
            y = self.matmul(x)
            self.rng.use_shared_rng()
            y = reduce_from_ranks(y, self.group)
        else:
            y = self.matmul(x) if self.region.gathered is None else self.region.run_row(self.matmul, x)
            # All-reduce, or with a sharded sequence reduce-scatter to [batch, sequence / tp, out_features].
            y = self.region.leave(y)
        # With a sharded sequence the replicated bias meets local tokens only: its gradient is summed over tp.
        if self._parameters.get("bias", self) is None:
            return y
        bias = self.local_bias(self.group if self.sum_bias_gradient else None)
        return y if bias is None else y + bias

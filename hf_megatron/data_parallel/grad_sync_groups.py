"""Gradient sync groups: the ranks that average a parameter's gradient, as shards and replicas (hybrid sharding)."""

from dataclasses import dataclass

import torch.distributed as dist

from ..core.mesh import ParallelMesh


@dataclass(frozen=True)
class GradSyncGroup:
    """The ranks that average one parameter's gradient.

    Attributes:
        shard_size, shard_rank, shard_group: the ranks that each own a different shard of its optimizer state.
        replicate_size, replicate_rank, replicate_group: the ranks that own the same shard.
        divisor: divides the sum of the ranks' gradients. It is the number of ranks, because a loss term that is
            computed from the weight itself is complete on each of them.
    """

    shard_size: int
    shard_rank: int
    shard_group: dist.ProcessGroup
    replicate_size: int
    replicate_rank: int
    replicate_group: dist.ProcessGroup
    divisor: int

    @classmethod
    def along(cls, axis: str, mesh: ParallelMesh) -> "GradSyncGroup":
        """Creates the group of the ranks along an axis, which has sub-axes for shards and replicas; collective."""
        shard, replicate = f"{axis}_shard", f"{axis}_replicate"
        return cls(
            mesh.axes.size(shard),
            mesh.axes.rank(shard),
            mesh.group(shard),
            mesh.axes.size(replicate),
            mesh.axes.rank(replicate),
            mesh.group(replicate),
            mesh.axes.size(shard) * mesh.axes.size(replicate),
        )

    @property
    def size(self) -> int:
        """Number of ranks that average the gradient."""
        return self.shard_size * self.replicate_size

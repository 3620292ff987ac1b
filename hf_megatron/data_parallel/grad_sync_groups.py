"""Which ranks reduce a parameter's gradient together: those that share it, and those that repeat their shares."""

from dataclasses import dataclass

import torch.distributed as dist

from ..core.mesh import ParallelMesh


@dataclass(frozen=True)
class GradSyncGroup:
    """The ranks that average one parameter's gradient.

    Attributes:
        shard_size, shard_rank, shard_group: the ranks that each own a part of its optimizer state.
        replicate_size, replicate_rank, replicate_group: the ranks that own the same part.
        divisor: what the sum of the ranks' gradients is divided by: their number, since each has a whole term of what
            a loop makes of the weight itself.
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
        """Finds the ranks along an axis that has shards and repetitions; every rank calls it."""
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
        """All of these ranks."""
        return self.shard_size * self.replicate_size

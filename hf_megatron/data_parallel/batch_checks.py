"""Check that all ranks of a model-parallel group (tp, cp, pp) are called with the same batch.

A DataLoader that each rank shuffles separately gives them different ones. The check waits for the device, so it runs
only in calls 1, 2, 4, 8, ... of a model.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_autograd import leave_uncompiled
from ..compat.torch_memory import is_fake
from ..core.axes import REPLICA_AXES
from ..core.communication.rank_errors import gather
from ..core.mesh import ParallelMesh
from ..errors import ConfigError, RankError


class SharedBatch(Shared):
    """Compares the arguments of the ranks of one data-parallel replica."""

    def __init__(self, mesh: ParallelMesh):
        # Collective: every rank of the job takes part in creating the groups.
        self.groups = {axis: mesh.host_group(axis) for axis in REPLICA_AXES if mesh.axes[axis].size > 1}
        self.calls = 0

    @leave_uncompiled
    def check(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raises `ConfigError` on all ranks of a replica if their tokens, labels or masks differ."""
        self.calls += 1
        # `n & (n - 1)` is 0 for powers of two only.
        if not self.groups or self.calls & (self.calls - 1):
            return
        checksums = batch_checksums(args, kwargs)
        if checksums is None:
            return
        # Checksums are exchanged instead of the tensors themselves.
        for axis, group in self.groups.items():
            ranks = gather(checksums, group, "Comparing the batch of a replica's ranks", error_type=RankError)
            names = checksums.keys() | {name for other in ranks for name in other}
            if different := sorted(
                name for name in names if any(other.get(name) != checksums.get(name) for other in ranks)
            ):
                raise ConfigError(
                    f"{', '.join(different)}: the {axis} ranks of a replica received different values (call "
                    f"{self.calls} of the model), but they must share a batch. Pass the DataLoader through "
                    "accelerator.prepare(...), or shuffle it with the same seed on all ranks. To split inputs "
                    "manually, use accelerator.split_between_processes(...), not PartialState's method or the rank of "
                    "torch.distributed."
                )


def batch_checksums(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, tuple] | None:
    """Returns shape and checksum of a call's tokens, labels and masks by name; `None` for fake tensors."""
    arguments = {f"argument {place}": value for place, value in enumerate(args)} | dict(kwargs)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and _is_replicated(value)}
    if any(map(is_fake, tensors.values())):
        return None
    return {name: (tuple(value.shape), _checksum(value)) for name, value in tensors.items()}


def _is_replicated(tensor: Tensor) -> bool:
    # Floating-point inputs such as embeddings are computed per rank and may differ in the last bits.
    return type(tensor) is Tensor and not tensor.is_floating_point() and not tensor.is_complex()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())

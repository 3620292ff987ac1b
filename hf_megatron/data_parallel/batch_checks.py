"""Ranks that share a batch have to be given the same one: a loader that each of them shuffles by itself gives others.

Compared in a model's calls 1, 2, 4, 8 and so on, as the host waits for its device then.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_autograd import leave_uncompiled
from ..compat.torch_memory import is_fake
from ..core.communication.rank_errors import gather
from ..core.mesh import ParallelMesh
from ..errors import ConfigError

_AXES = ("tp", "cp", "pp")


class SharedBatch(Shared):
    """Compares what the ranks of one replica are given."""

    def __init__(self, mesh: ParallelMesh):
        # Every rank makes the groups.
        self.groups = {axis: mesh.host_group(axis) for axis in _AXES if mesh.axes[axis].size > 1}
        self.calls = 0

    @leave_uncompiled
    def check(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raises `ConfigError` on all ranks of a replica where their tokens, labels or masks differ."""
        self.calls += 1
        if not self.groups or self.calls & (self.calls - 1):
            return
        arguments = {f"argument {place}": value for place, value in enumerate(args)} | dict(kwargs)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and _is_integer(value)}
        if any(map(is_fake, tensors.values())):
            return
        checksums = {name: (tuple(value.shape), _checksum(value)) for name, value in tensors.items()}
        for axis, group in self.groups.items():
            ranks = gather(checksums, group, "Comparing the batch of a replica's ranks")
            names = checksums.keys() | {name for other in ranks for name in other}
            if different := sorted(
                name for name in names if any(other.get(name) != checksums.get(name) for other in ranks)
            ):
                raise ConfigError(
                    f"{', '.join(different)}: the {axis} ranks of a replica were given different ones (call "
                    f"{self.calls} of the model), and share a batch. Pass the DataLoader through "
                    "accelerator.prepare(...), or have it shuffled by one seed on all ranks. Of inputs split by hand, "
                    "accelerator.split_between_processes(...) gives the ranks of a replica the same ones; "
                    "PartialState's, or the rank of torch.distributed, does not."
                )


def _is_integer(tensor: Tensor) -> bool:
    # Embeddings are computed, and may differ in their last bits.
    return type(tensor) is Tensor and not tensor.is_floating_point() and not tensor.is_complex()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())

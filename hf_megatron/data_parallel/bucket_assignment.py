"""Which parameters travel together, and how many."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..compat.torch_dtensor import local_tensor
from ..core.communication.bucket_collectives import is_pairwise
from ..core.communication.collectives import share
from .buckets import Bucket, Slot
from .grad_sync_groups import GradSyncGroup

_Key = tuple[GradSyncGroup, torch.dtype, torch.dtype, torch.device]


def default_capacity(ranks: int, dtype: torch.dtype, *, pairwise: bool) -> int:
    """Returns the bytes of a bucket over so many ranks: Megatron's max(40M, 1M x ranks) entries.

    A rank's part of it must not become smaller than what fills a network. Where ranks send to each other one by one, on
    CPUs, a bucket has 32 MiB.
    """
    return 2**25 if pairwise else max(40_000_000, 1_000_000 * ranks) * dtype.itemsize


def make_buckets(
    parameters: Iterable[nn.Parameter],
    sharing_of: Callable[[nn.Parameter], GradSyncGroup],
    capacity: int | None,
    gradient_dtype: torch.dtype | None,
) -> list[Bucket]:
    """Fills buckets in the given order, up to `capacity` bytes each; one sharing, dtype and device per bucket.

    Args:
        parameters: in the order in which backward is expected to reach them.
        sharing_of (`Callable`): parameter -> the ranks that share it.
        capacity (`int`, *optional*): bytes, by default `default_capacity`; a larger parameter has a bucket of its own.
        gradient_dtype (`torch.dtype`, *optional*): of the sums of half-precision parameters; their own by default.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[_Key, list[Slot]] = {}

    def close(key: _Key) -> None:
        sharing, _, dtype, device = key
        buckets.append(Bucket(open_buckets.pop(key), sharing, dtype, device))

    for parameter in parameters:
        entries = local_tensor(parameter).numel()
        half = parameter.dtype in (torch.bfloat16, torch.float16)
        dtype = gradient_dtype if half and gradient_dtype is not None else parameter.dtype
        sharing = sharing_of(parameter)
        key = (sharing, parameter.dtype, dtype, local_tensor(parameter).device)
        slots = open_buckets.setdefault(key, [])
        start = slots[-1].start + slots[-1].width if slots else 0
        slots.append(Slot(parameter, start, share(entries, sharing.shard_size), entries))
        most = capacity
        if most is None:
            most = default_capacity(sharing.shard_size, dtype, pairwise=is_pairwise(sharing.shard_group))
        if (start + slots[-1].width) * sharing.shard_size * dtype.itemsize >= most:
            close(key)
    for key in list(open_buckets):
        close(key)
    return buckets

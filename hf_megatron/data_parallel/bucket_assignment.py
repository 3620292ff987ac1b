"""Assignment of parameters to communication buckets."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..compat.torch_dtensor import local_tensor
from ..core.communication.bucket_collectives import is_pairwise
from ..core.communication.collectives import padded_shard_size
from .buckets import Bucket, Slot
from .grad_sync_groups import GradSyncGroup

_Key = tuple[GradSyncGroup, torch.dtype, torch.dtype, torch.device]


def default_capacity(ranks: int, dtype: torch.dtype, *, pairwise: bool) -> int:
    """Returns the default bucket size in bytes: Megatron-Core's max(40M, 1M x ranks) entries.

    It grows with the number of ranks so that the segment of each rank stays large enough to saturate the network.

    Args:
        pairwise (`bool`): whether ranks exchange segments by point-to-point messages (gloo); a bucket has 32 MiB then.
    """
    return 2**25 if pairwise else max(40_000_000, 1_000_000 * ranks) * dtype.itemsize


def make_buckets(
    parameters: Iterable[nn.Parameter],
    sharing_of: Callable[[nn.Parameter], GradSyncGroup],
    capacity: int | None,
    gradient_dtype: torch.dtype | None,
) -> list[Bucket]:
    """Assigns parameters to buckets in the given order; a bucket has one sync group, dtype and device.

    Args:
        parameters: in the order in which backward is expected to reach them.
        sharing_of (`Callable`): parameter -> the ranks that average its gradient.
        capacity (`int`, *optional*): bytes at which a bucket is closed; defaults to `default_capacity`.
        gradient_dtype (`torch.dtype`, *optional*): dtype that gradients of half-precision parameters are accumulated
            in; defaults to the parameter's.
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
        # One bucket per key is open at a time: experts and adapters may be averaged over other ranks than the rest.
        key = (sharing, parameter.dtype, dtype, local_tensor(parameter).device)
        slots = open_buckets.setdefault(key, [])
        # A slot takes `ceil(entries / ranks)` columns of the bucket's `[ranks, width]` buffer.
        start = slots[-1].start + slots[-1].width if slots else 0
        width = padded_shard_size(entries, sharing.shard_size)
        slots.append(Slot(parameter, start, width, entries, is_even=entries == width * sharing.shard_size > 0))
        most = capacity
        if most is None:
            most = default_capacity(sharing.shard_size, dtype, pairwise=is_pairwise(sharing.shard_group))
        if (start + slots[-1].width) * sharing.shard_size * dtype.itemsize >= most:
            close(key)
    # The remaining buckets are not full.
    for key in list(open_buckets):
        close(key)
    return buckets

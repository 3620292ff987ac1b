"""All-gather of parameters after an optimizer step: each rank sends the shards that it has updated.

On gloo, large parameters are sent and received in place. Small ones, and all parameters on other backends, are
all-gathered in buckets.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.tensor_lists import list_local_tensors
from ..compat.torch_dtensor import local_tensor
from ..core.communication.bucket_collectives import AllGather, is_pairwise
from .bucket_assignment import make_buckets
from .buckets import Bucket, owned_range
from .grad_sync_groups import GradSyncGroup

# Entries per rank below which a separate message costs more than a copy into a bucket.
_LARGE = 2**15
# Buckets that have memory at the same time.
_IN_FLIGHT = 2


class ParamAllGather:
    """All-gather of parameters whose shards were updated, one on each rank of the shard group.

    Args:
        parameters (`Sequence[nn.Parameter]`): in the same order on every rank.
        sharing (`GradSyncGroup`): sync group of all these parameters.
        keep_views (`bool`): whether views of the parameters' memory, which keep it alive, are created once. The memory
            must not change afterwards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sharing: GradSyncGroup, *, keep_views: bool = False):
        self.sharing = sharing
        in_place = is_pairwise(sharing.shard_group)
        smallest = _LARGE * sharing.shard_size
        self._in_place = [p for p in parameters if in_place and local_tensor(p).numel() >= smallest]
        others = [p for p in parameters if not in_place or local_tensor(p).numel() < smallest]
        self._buckets = make_buckets(others, lambda _: sharing, None, None)
        self._views = list(map(self._view, self._buckets)) if keep_views else None

    @torch.no_grad()
    def run(self) -> None:
        """Runs the all-gather; returns when this rank has all shards. Collective over the shard group."""
        works = [work for parameter in self._in_place for work in self._exchange(parameter)]
        started: list[tuple[Bucket, AllGather, list[Tensor]]] = []
        for index, bucket in enumerate(self._buckets):
            owned, parts = self._view(bucket) if self._views is None else self._views[index]
            # [ranks, width + parameters]: this rank fills its own row, and receives the others.
            rows = bucket.open_buffer()
            torch._foreach_copy_(bucket.list_owned(rows[self.sharing.shard_rank]), owned)
            started.append((bucket, AllGather(rows, self.sharing.shard_group), parts))
            if len(started) == _IN_FLIGHT:
                _receive(*started.pop(0))
        for item in started:
            _receive(*item)
        for work in works:
            work.wait()

    def _view(self, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
        """Returns views of a bucket's parameters: this rank's shard of each, and all entries as `Slot.cut`."""
        ranks, rank = self.sharing.shard_size, self.sharing.shard_rank
        local_params = list_local_tensors([slot.parameter for slot in bucket.slots])
        flat = [local.detach().view(-1) for local in local_params]
        owned = [one[slice(*owned_range(len(one), ranks, rank))] for one in flat]
        return owned, [part for slot, one in zip(bucket.slots, flat, strict=True) for part in slot.cut(one)]

    def _exchange(self, parameter: nn.Parameter) -> list[Any]:
        flat: Tensor = local_tensor(parameter).detach().view(-1)
        ranks, rank, group = self.sharing.shard_size, self.sharing.shard_rank, self.sharing.shard_group
        # One shard per rank: views of the local parameter, so nothing is copied.
        parts = [flat[slice(*owned_range(flat.numel(), ranks, other))] for other in range(ranks)]
        works: list[Any] = []
        for other, part in enumerate(parts):
            if other == rank:
                continue
            if parts[rank].numel():
                works.append(dist.isend(parts[rank], group=group, group_dst=other))
            if part.numel():
                works.append(dist.irecv(part, group=group, group_src=other))
        return works


def _receive(bucket: Bucket, gather: AllGather, parts: list[Tensor]) -> None:
    gather.wait()
    # The last columns are the flags'. Without padding, a slot's columns are read without a Python call.
    received = [
        part
        for slot, columns in zip(bucket.slots, bucket.open_columns(), strict=False)
        for part in ((columns,) if slot.is_even else slot.cut_columns(columns))
    ]
    if parts:
        torch._foreach_copy_(parts, received)
    # Free the buffer: it would be a second copy of the weights.
    bucket.free_buffer()

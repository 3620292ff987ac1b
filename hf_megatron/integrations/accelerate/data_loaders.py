"""Prepared data loaders whose ranks may run out of data at different times: all stop together at the shortest.

Only used where equal lengths are not guaranteed: for an IterableDataset, or batches that are not evened out. Other
loaders are left alone.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...errors import DataError
from .batch_shards import batches_are_ours, find_batch_shard, find_sampler, get_batch_group, get_batch_mesh
from .shuffled_order import begin_order


def make_dispatcher(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Passes the layout's mesh to a dispatching loader; `skip_first_batches` omits it when it recreates a loader."""
    if kwargs.get("torch_device_mesh") is None and (mesh := get_batch_mesh()) is not None:
        kwargs["torch_device_mesh"] = mesh
    original(self, *args, **kwargs)


def iterate(original: Callable, self: Any) -> Iterator[Any]:
    """Iterates over a loader whose ranks agree before each batch on whether any of them has ended.

    The stock iteration reads one batch ahead to flag the last one, so every rank flags the same batch.
    """
    group = get_batch_group()
    base = self.base_dataloader
    _require_own_order(base)
    if batches_are_ours():
        begin_order(base)
    if group is not None and "_hf_megatron_seen" not in vars(base):
        from ..trainer.global_batches import draw_for_all_ranks, read_full_stream

        base._hf_megatron_seen = True
        draw_for_all_ranks(base)
        read_full_stream(base)
    if group is not None and "_hf_megatron_group" not in vars(base) and _may_differ(base):
        base._hf_megatron_group = group
        base.__class__ = _agreed_class(type(base))
    return original(self)


def _require_own_order(loader: Any) -> None:
    from torch.utils.data import RandomSampler

    from ...datasets.dataset_order import has_own_order

    if has_own_order(loader.dataset) and isinstance(find_sampler(loader), RandomSampler):
        raise DataError(
            f"{type(loader.dataset).__name__} defines its own sample order, and this DataLoader shuffles it again. "
            "Create it with shuffle=False."
        )


def _may_differ(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        return True
    shard = find_batch_shard(loader)
    return shard is not None and shard.num_processes > 1 and not shard.even_batches and not shard.drop_last


def _agreed_class(base: Any) -> type:
    """Returns a subclass of the data loader whose iteration ends on all ranks of the group when it ends on one."""
    # Use a single base class: Python only allows `__class__` assignment between compatible object layouts.
    return type(f"Agreed{base.__name__}", (base,), {"__iter__": lambda self: _agreed(self, iter(base.__iter__(self)))})


def _agreed(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    from ..trainer.global_batches import CountedBatch

    group, read, nothing = loader._hf_megatron_group, 0, object()
    device = "cpu" if "gloo" in dist.get_backend(group) else torch.accelerator.current_accelerator()
    while True:
        batch = next(iterator, nothing)
        if isinstance(batch, CountedBatch) and batch.batch is None:
            batch = nothing
        # [any rank ended, any rank continues]
        ended = torch.tensor([batch is nothing, batch is not nothing], dtype=torch.int, device=device)
        dist.all_reduce(ended, dist.ReduceOp.MAX, group=group)
        some_ended, some_go_on = ended.tolist()
        if some_ended:
            if some_go_on:
                _warn(loader, batch is nothing, read, group)
            return
        read += 1
        if isinstance(batch, CountedBatch):
            batch, *loader._hf_megatron_last = batch
        yield batch


def _warn(loader: Any, ended: bool, read: int, group: Any) -> None:
    """Warns on rank 0 which ranks ended first and how many batches others have left; a collective call of the group."""
    try:
        length = len(loader)
    except TypeError:
        # Unknown without reading on; at least the batch that was read ahead is left.
        length = -1
    rank_states: list[tuple[int, bool, int]] = [(0, False, 0)] * dist.get_world_size(group)
    dist.all_gather_object(rank_states, (dist.get_rank(), ended, length), group=group)
    if dist.get_rank() != 0:
        return
    first = ", ".join(str(rank) for rank, is_out, _ in rank_states if is_out)
    others = [length - read for _, is_out, length in rank_states if not is_out]
    left = f"at most {max(others)}" if all(count > 0 for count in others) else "at least 1"
    warnings.warn(
        f"Rank {first} ran out of data first, after {read} batches; all ranks stop there and {left} of another rank's "
        "batches is skipped. Use shards of equal length (even_batches=True, or truncate the IterableDataset).",
        stacklevel=2,
    )

"""Tests of placement arithmetic against DTensor, without a process group."""

import pytest
import torch
from torch.distributed.tensor import Shard

from hf_megatron.checkpoint.initialize import local_part
from hf_megatron.core.axes import Axes
from hf_megatron.core.placement import Placement


def make_split(dim, ranks, rank, **options):
    """Returns a placement split over tp and the axes of `rank`."""
    return Placement.split("tp", dim, **options), Axes.from_sizes(rank, tp=ranks)


@pytest.mark.parametrize("size", [1, 5, 8, 131, 90])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_plain_split_matches_dtensor_shard(size, ranks):
    for rank in range(ranks):
        placement, axes = make_split(0, ranks, rank)
        [[(start, stop)]] = placement.intervals((size,), axes)
        length, offset = Shard.local_shard_size_and_offset(size, ranks, rank)
        assert stop - start == length
        assert length == 0 or start == offset


@pytest.mark.parametrize(
    "options", [{"dim": 0}, {"dim": 1, "groups": 2}, {"dim": 0, "groups": 3}, {"dim": 0, "copies": 2}]
)
def test_shards_cover_the_full_tensor(options):
    full = torch.arange(12 * 8).view(12, 8)
    shards = [
        local_part(full, *make_split(ranks=4, rank=rank, **options)) for rank in range(0, 4, options.get("copies", 1))
    ]
    entries = torch.cat([shard.flatten() for shard in shards]).sort().values
    assert torch.equal(entries, full.flatten())


def test_copies_share_a_shard():
    for rank in (0, 1):
        placement, axes = make_split(0, 4, rank, copies=2)
        assert placement.intervals((8,), axes) == [[(0, 4)]]


def test_groups_are_split_separately():
    # Gate rows 0-5 and up rows 6-11: each rank gets a shard of both.
    placement, axes = make_split(0, 2, 1, groups=2)
    assert placement.intervals((12,), axes) == [[(3, 6), (9, 12)]]


def test_replicated_shard_does_not_share_storage():
    full = torch.zeros(3)
    assert local_part(full, Placement(), Axes.from_sizes(0, tp=2)).data_ptr() != full.data_ptr()

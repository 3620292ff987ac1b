"""Placement arithmetic against DTensor's own, without a process group."""

import pytest
import torch
from torch.distributed.tensor import Shard

from hf_megatron.checkpoint.initialize import local_part
from hf_megatron.spec import Placement


@pytest.mark.parametrize("size", [1, 5, 8, 131, 90])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_plain_split_is_torch_chunk(size, ranks):
    for rank in range(ranks):
        [(start, stop)] = Placement(0).intervals(size, ranks, rank)
        length, offset = Shard.local_shard_size_and_offset(size, ranks, rank)
        assert stop - start == length
        assert length == 0 or start == offset


@pytest.mark.parametrize(
    "placement", [Placement(0), Placement(1, groups=2), Placement(0, groups=3), Placement(0, copies=2)]
)
def test_parts_make_up_the_whole(placement):
    full = torch.arange(12 * 8).view(12, 8)
    parts = [local_part(full, placement, 4, rank) for rank in range(0, 4, placement.copies)]
    counted = torch.cat([part.flatten() for part in parts]).sort().values
    assert torch.equal(counted, full.flatten())


def test_copies_share_a_shard():
    placement = Placement(0, copies=2)
    assert placement.intervals(8, 4, 0) == placement.intervals(8, 4, 1) == [(0, 4)]


def test_blocks_are_split_one_by_one():
    # gate rows 0-5, up rows 6-11: each rank gets its part of both.
    assert Placement(0, groups=2).intervals(12, 2, 1) == [(3, 6), (9, 12)]


def test_replicated_part_has_storage_of_its_own():
    full = torch.zeros(3)
    assert local_part(full, Placement(), 2, 0).data_ptr() != full.data_ptr()

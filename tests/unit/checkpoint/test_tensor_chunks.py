"""Tests of the tensor boxes of sharded tensors, against brute-force slicing of a numbered tensor."""

import itertools
import json
import math
import random
import time

import pytest
import torch

from hf_megatron.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry
from hf_megatron.checkpoint.tensor_chunks import LocalChunk, TensorChunk, copy_overlap, local_boxes, uncovered
from hf_megatron.core.axes import Axes
from hf_megatron.core.io.checksums import FileDigest
from hf_megatron.core.placement import Placement, Split
from hf_megatron.errors import CheckpointError

SHAPES = [(), (1,), (12,), (7,), (0, 3), (6, 5), (12, 1), (4, 6, 3), (2, 12, 2), (3, 2, 6, 2)]


def make_arange(shape):
    return torch.arange(math.prod(shape)).view(shape)


def on(ranks, rank):
    return Axes.from_sizes(rank, tp=ranks)


def slice_shard(tensor, placement, ranks, rank):
    """Returns the flattened local shard, computed by slicing and concatenation."""
    for split in placement.splits:
        intervals = split.intervals(tensor.shape[split.dim], on(ranks, rank))
        slices = [tensor.narrow(split.dim, start, stop - start) for start, stop in intervals]
        tensor = torch.cat(slices, split.dim)
    return tensor.reshape(-1)


def read_boxes(tensor, boxes):
    """Returns the entries of `boxes`, concatenated."""
    values = [
        tensor[tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))].reshape(-1)
        for box in boxes
    ]
    return torch.cat(values) if values else tensor.new_empty(0)


def iter_placements(shape):
    yield Placement(), 2
    for dim, groups, copies, shards in itertools.product(range(len(shape)), (1, 2, 3), (1, 2), (1, 2, 3, 5)):
        if shape[dim] % groups == 0:
            yield Placement.split("tp", dim, groups=groups, copies=copies), shards * copies


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_local_boxes_match_sliced_shards(shape):
    tensor, generator = make_arange(shape), random.Random(0)
    for placement, ranks in iter_placements(shape):
        for rank in range(ranks):
            expected = slice_shard(tensor, placement, ranks, rank)
            size = expected.numel()
            assert torch.equal(read_boxes(tensor, local_boxes(shape, placement, on(ranks, rank))), expected)
            for _ in range(6):
                start, stop = sorted(generator.choices(range(size + 1), k=2))
                boxes = local_boxes(shape, placement, on(ranks, rank), start, stop)
                assert torch.equal(read_boxes(tensor, boxes), expected[start:stop]), (
                    placement,
                    ranks,
                    rank,
                    start,
                    stop,
                )
                assert all(box.numel for box in boxes)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1], ids=str)
def test_two_dims_split_over_two_axes(shape):
    tensor, generator = make_arange(shape), random.Random(2)
    for first, second in itertools.permutations(range(len(shape)), 2):
        for groups in (1, 2):
            if shape[first] % groups:
                continue
            placement = Placement((Split("tp", first, groups), Split("dp", second)))
            for rank in range(6):
                axes, expected = Axes.from_sizes(rank, tp=2, dp=3), tensor
                for split in placement.splits:
                    intervals = split.intervals(shape[split.dim], axes)
                    index = [position for start, stop in intervals for position in range(start, stop)]
                    expected = expected.index_select(split.dim, torch.tensor(index, dtype=torch.long))
                flat = expected.reshape(-1)
                assert torch.equal(read_boxes(tensor, local_boxes(shape, placement, axes)), flat)
                start, stop = sorted(generator.choices(range(flat.numel() + 1), k=2))
                boxes = local_boxes(shape, placement, axes, start, stop)
                assert torch.equal(read_boxes(tensor, boxes), flat[start:stop])


def test_box_count_is_small():
    assert len(local_boxes((64, 32), Placement.split("tp", 0), on(4, 1))) == 1
    assert len(local_boxes((64, 32), Placement.split("tp", 1), on(4, 1))) == 1
    assert len(local_boxes((64, 32), Placement.split("tp", 0, groups=2), on(4, 1))) == 2
    assert len(local_boxes((64, 32), Placement.split("tp", 0, groups=2), on(1, 0))) == 1
    assert len(local_boxes((64, 32), Placement(), on(1, 0), 5, 2000)) == 3
    assert len(local_boxes((8, 64, 32), Placement.split("tp", 1), on(2, 1), 5, 7990)) == 5


def test_range_outside_shard_is_rejected():
    with pytest.raises(CheckpointError, match="which has 24 entries"):
        local_boxes((6, 8), Placement.split("tp", 0), on(2, 0), 0, 25)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape)], ids=str)
def test_copy_overlap_reshards_any_layout(shape):
    tensor, generator = make_arange(shape), random.Random(1)
    options = list(iter_placements(shape))
    for _ in range(40):
        (source, source_ranks), (target, target_ranks) = generator.choices(options, k=2)
        rank = generator.randrange(target_ranks)
        expected = slice_shard(tensor, target, target_ranks, rank)
        boxes = local_boxes(shape, target, on(target_ranks, rank))
        out = torch.full_like(expected, -1)
        copied, sources = 0, []
        for source_rank in range(0, source_ranks, source.splits[0].copies if source.is_split else source_ranks):
            shard = slice_shard(tensor, source, source_ranks, source_rank)
            middle = generator.randrange(shard.numel() + 1)
            for start, stop in ((0, middle), (middle, shard.numel())):
                source_boxes = local_boxes(shape, source, on(source_ranks, source_rank), start, stop)
                copied += copy_overlap(source_boxes, shard[start:stop], boxes, out)
                sources.append(source_boxes)
        assert torch.equal(out, expected)
        assert copied == out.numel()
        assert uncovered(sources, boxes) == 0


def test_copy_overlap_returns_copied_entry_count():
    full = (TensorChunk((0, 0), (4, 4)),)
    out = torch.zeros(16)
    assert copy_overlap((TensorChunk((1, 2), (2, 2)),), torch.ones(4), full, out) == 4
    assert out.view(4, 4)[1:3, 2:].sum() == out.sum() == 4
    assert copy_overlap((), torch.ones(0), full, out) == 0
    assert uncovered([(TensorChunk((1, 2), (2, 2)),), (TensorChunk((0, 0), (3, 4)),)], full) == 4
    with pytest.raises(CheckpointError, match="4 entries, but the data has 5"):
        copy_overlap((TensorChunk((1, 2), (2, 2)),), torch.ones(5), full, out)


def test_many_boxes_are_fast_and_compact_in_manifest():
    shape, placement = (3000, 24), Placement.split("tp", 1, groups=3)
    source = [local_boxes(shape, placement, on(2, rank)) for rank in range(2)]
    assert len(source[0]) == 9000
    tensor = make_arange(shape)
    out = torch.full((36000,), -1)
    began = time.process_time()
    copied = copy_overlap(source[1], slice_shard(tensor, placement, 2, 1), source[1], out)
    assert time.process_time() - began < 3
    assert copied == 36000 and torch.equal(out, slice_shard(tensor, placement, 2, 1))

    entry = TensorEntry(shape, torch.int64, (ChunkEntry("a.safetensors", "x", source[1]),))
    manifest = Manifest(1, {}, {"a.safetensors": FileDigest(1 << 20, "0" * 64)}, {"x": entry})
    text = json.dumps(manifest.to_dict())
    assert len(text) < 1000
    assert Manifest.from_dict(json.loads(text), "here").tensors == {"x": entry}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_manifest_round_trips_all_boxes(shape):
    for placement, ranks in iter_placements(shape):
        boxes = local_boxes(shape, placement, on(ranks, ranks - 1))
        entry = TensorEntry(shape, torch.int64, (ChunkEntry("a", "x", boxes),))
        manifest = Manifest(1, {}, {"a": FileDigest(1 << 20, "0" * 64)}, {"x": entry})
        assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict())), "here").tensors["x"] == entry


def test_local_chunk_validates_itself():
    assert LocalChunk("scalar", (), (TensorChunk((), ()),), torch.ones(1)).boxes[0].numel == 1
    with pytest.raises(CheckpointError, match="weight: the chunk .* exceeds"):
        LocalChunk("weight", (4, 4), (TensorChunk((3, 0), (2, 4)),), torch.ones(8))
    with pytest.raises(CheckpointError, match="weight: the chunks have 8 entries, but the data has 7"):
        LocalChunk("weight", (4, 4), (TensorChunk((2, 0), (2, 4)),), torch.ones(7))
    with pytest.raises(CheckpointError, match="one dim"):
        LocalChunk("weight", (4, 4), (TensorChunk((2, 0), (2, 4)),), torch.ones(2, 4))

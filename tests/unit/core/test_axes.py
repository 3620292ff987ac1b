"""Tests of rank coordinates, held shards and gradient groups against an oracle that enumerates all ranks."""

import functools
import itertools
import math

import pytest
import torch

from hf_megatron import ConfigError, MegatronConfig
from hf_megatron.checkpoint.local_shards import holding
from hf_megatron.core.axes import Axes, Axis
from hf_megatron.core.placement import GradientRule, ParameterSharding, Placement, Split
from hf_megatron.models.spec import ModelSpec
from hf_megatron.parallel_state import ParallelState

LARGEST = 64
# World sizes above 32 with many divisors, so that every axis takes many sizes.
MANY_DIVISORS = (48, 60, 63, 64)
WORLD = ("tp", "cp", "pp", "dp")


def list_divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def iter_layouts():
    """Yields every tp x cp x pp x dp layout with up to 64 ranks."""
    for sizes in itertools.product(range(1, LARGEST + 1), repeat=2):
        for pp in range(1, LARGEST // math.prod(sizes) + 1):
            for dp in range(1, LARGEST // (math.prod(sizes) * pp) + 1):
                yield dict(zip(WORLD, (*sizes, pp, dp), strict=True))


def split_batches(items, length):
    items = list(items)
    return [items[start : start + length] for start in range(0, len(items), length)]


def count_coordinates(tp, cp, pp, dp, dp_replicate=1, etp=1, ep=1):
    """Returns the coordinates of every rank, by enumeration."""
    coordinates = []
    for dp_rank, pp_rank, cp_rank, tp_rank in itertools.product(range(dp), range(pp), range(cp), range(tp)):
        coordinates.append({"tp": tp_rank, "cp": cp_rank, "pp": pp_rank, "dp": dp_rank})
    for replica, block in enumerate(split_batches(range(dp), dp // dp_replicate)):
        for position, dp_rank in enumerate(block):
            for rank in coordinates:
                if rank["dp"] == dp_rank:
                    rank |= {"dp_replicate": replica, "dp_shard": position}
    # Experts are assigned to the ranks of a stage in rank order.
    for pp_rank in range(pp):
        stage = [rank for rank in coordinates if rank["pp"] == pp_rank]
        lines = [[rank for rank in stage if rank["tp"] == position] for position in range(tp)] if etp > 1 else [stage]
        for position, line in enumerate(lines):
            for repetition, group in enumerate(split_batches(line, ep)):
                for expert, rank in enumerate(group):
                    rank |= {"etp": position, "ep": expert, "edp": repetition}
    return coordinates


def find_groups(found, axis, others):
    """Returns the groups of ranks that agree in all other coordinates, ordered along `axis`."""
    groups = {}
    for index, rank in enumerate(found):
        groups.setdefault(tuple(rank[name] for name in others), []).append((rank[axis], index))
    return sorted(tuple(index for _, index in sorted(members)) for members in groups.values())


def check_groups(sizes, axes, found, names_and_others):
    for name, others in names_and_others.items():
        expected = find_groups(found, name, others)
        assert sorted(axes.groups(name)) == expected, (sizes, name)
        for group in expected:
            for position, rank in enumerate(group):
                rank_axes = axes.of_rank(rank)
                assert rank_axes.rank(name) == position and rank_axes.ranks(name) == group, (sizes, name, rank)
                assert rank_axes.neighbour(name) == group[(position + 1) % len(group)]
                assert rank_axes.neighbour(name, -1) == group[position - 1]


def test_coordinates_match_counting():
    checked = 0
    for sizes in iter_layouts():
        check_groups(
            sizes,
            Axes.from_sizes(0, **sizes),
            count_coordinates(**sizes),
            {n: [o for o in WORLD if o != n] for n in WORLD},
        )
        checked += 1
    assert checked > 1800


def test_dp_shard_and_dp_replicate_groups():
    for inner, dp in itertools.product(range(1, LARGEST + 1), repeat=2):
        for replicas in list_divisors(dp) if inner * dp <= LARGEST else ():
            sizes = {"tp": inner, "dp": dp, "dp_replicate": replicas}
            coordinates = count_coordinates(cp=1, pp=1, **sizes)
            others = {"dp_shard": ["tp", "dp_replicate"], "dp_replicate": ["tp", "dp_shard"]}
            check_groups(sizes, Axes.from_sizes(0, **sizes), coordinates, others)


def fits_axes(tp, cp, dp, etp, ep):
    """Returns whether expert parallelism fills each axis before it uses the next."""
    for size in ((tp,) if etp == 1 else ()) + (cp, dp):
        used = min(size, ep)
        if size % used or ep % used:
            return False
        ep //= used
    return ep == 1


def iter_expert_layouts(largest):
    for sizes in iter_layouts():
        tp, cp, pp, dp = sizes.values()
        if tp * cp * pp * dp > largest:
            continue
        for etp in {1, tp}:
            for ep in list_divisors(tp * cp * dp // etp):
                if fits_axes(tp, cp, dp, etp, ep):
                    yield sizes | {"etp": etp, "ep": ep}


def test_expert_groups_match_counting():
    checked = 0
    for sizes in iter_expert_layouts(LARGEST):
        if sizes["ep"] == 1 and sizes["etp"] == 1:
            continue
        axes, coordinates = Axes.from_sizes(0, **sizes), count_coordinates(**sizes)
        for name in ("etp", "ep", "edp"):
            others = ["pp", *{"etp", "ep", "edp"} - {name}]
            assert sorted(axes.groups(name)) == find_groups(coordinates, name, others), (sizes, name)
        checked += 1
    assert checked > 3000


def test_indivisible_sizes_are_rejected():
    for arguments, text in (
        ({"tp": 2, "dp": 3, "ep": 4}, "ep_size = 4"),
        ({"tp": 4, "etp": 2}, "etp_size = 2"),
        ({"tp": 2, "ep": 4}, "ep_size = 4"),
    ):
        with pytest.raises(ConfigError, match=text):
            Axes.from_sizes(0, **arguments)
    with pytest.raises(ConfigError, match="has ranks 0 to 3"):
        Axes.of(MegatronConfig(tp_size=2, dp_size=2), 4)
    with pytest.raises(ConfigError, match="3 does not divide the axis of 4 ranks"):
        Axis(((1, 4),)).inner(3)
    with pytest.raises(ValueError, match="cross"):
        Axis(((1, 6),)).without(Axis(((2, 2),)))


# Held and saved entries

PLACEMENTS = {
    "whole": Placement(),
    "rows": Placement.split("tp", 0),
    "columns": Placement.split("tp", 1),
    "packed": Placement.split("tp", 0, groups=3),
    "experts": Placement((Split("ep", 0),)),
    "wide experts": Placement((Split("ep", 0), Split("etp", 1))),
}
SHAPE = (12, 7)


def list_local_entries(placement, coordinates, sizes):
    """Returns the flattened indices of the entries on a rank, split as by `torch.chunk`."""
    positions = tuple((sizes[split.axis], coordinates[split.axis]) for split in placement.splits)
    return _list_local_entries(placement, positions)


@functools.cache
def _list_local_entries(placement, places):
    tensor = torch.arange(math.prod(SHAPE)).view(SHAPE)
    for split, (ranks, rank) in zip(placement.splits, places, strict=True):
        blocks = tensor.chunk(split.groups, split.dim)
        shards = [block.chunk(ranks // split.copies, split.dim) for block in blocks]
        position = rank // split.copies
        tensor = torch.cat(
            [shard[position] if position < len(shard) else shard[0].narrow(split.dim, 0, 0) for shard in shards]
        )
        if split.dim == 1:
            assert split.groups == 1
    return tensor.flatten().tolist()


@functools.cache
def read_boxes(boxes):
    tensor = torch.arange(math.prod(SHAPE)).view(SHAPE)
    values = []
    for box in boxes:
        index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        values.extend(tensor[index].flatten().tolist())
    return values


def take_shard(numbers, shards, shard):
    width = math.ceil(len(numbers) / shards)
    return numbers[shard * width : (shard + 1) * width]


def make_state(axes, zero_stage, placement, average):
    config = MegatronConfig(zero_stage=zero_stage)
    shardings = {"weight": ParameterSharding("weight", SHAPE, "", placement, GradientRule(average=average))}
    return ParallelState(config, axes, ModelSpec(""), shardings)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_every_entry_is_held_and_saved_by_its_owners(zero_stage):
    """Weights and moments are split as by `torch.chunk`, and the ranks of a stage together save each entry once."""
    for sizes in iter_expert_layouts(8):
        check_entries(sizes, zero_stage, PLACEMENTS, (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "packed", "wide experts"])
def test_entries_in_layouts_up_to_64_ranks(name):
    for sizes in iter_expert_layouts(LARGEST):
        # Every pipeline stage has the same sharding, so pp_size > 1 adds nothing here.
        ranks = sizes["tp"] * sizes["cp"] * sizes["dp"]
        if sizes["pp"] > 1 or (ranks > 32 and ranks not in MANY_DIVISORS):
            continue
        check_entries(sizes, 1, {name: PLACEMENTS[name]}, (True,))


def check_entries(sizes, zero_stage, placements, kinds):
    axes, all_coordinates = (
        Axes.from_sizes(0, **sizes, dp_replicate=None if zero_stage == 0 else 1),
        count_coordinates(**sizes),
    )
    for name, placement in placements.items():
        is_expert = "experts" in name
        if (zero_stage == 3 and is_expert) or (is_expert and sizes["etp"] > 1 and name == "experts"):
            # Not covered: FSDP2 units of experts, and experts not split over etp, a layout that does not occur.
            continue
        average = "edp" if is_expert else "dp_cp"
        shards = axes.size(average)
        for is_moment in kinds:
            written = {}
            for rank, coordinates in enumerate(all_coordinates):
                shard = coordinates["edp"] if is_expert else coordinates["dp"] * sizes["cp"] + coordinates["cp"]
                state = make_state(axes.of_rank(rank), zero_stage, placement, average)
                local_shard = holding(state, "weight", SHAPE, is_moment=is_moment)
                expected = list_local_entries(placement, coordinates, sizes)
                if zero_stage == 1 and is_moment:
                    expected = take_shard(expected, shards, shard)
                elif zero_stage == 3 and shards > 1:
                    local = placement.local_shape(SHAPE, axes.of_rank(rank))
                    rows = split_batches(expected, local[1]) if local[1] else []
                    expected = [entry for row in take_shard(rows, shards, shard) for entry in row]
                assert read_boxes(local_shard.boxes()) == expected, (sizes, name, rank)
                chunk = local_shard.share("weight", torch.tensor(expected))
                if chunk is not None:
                    assert read_boxes(chunk.boxes) == chunk.data.tolist()
                    written.setdefault(coordinates["pp"], []).extend(chunk.data.tolist())
            for values in written.values():
                assert sorted(values) == list(range(math.prod(SHAPE))), (sizes, name, is_moment)


# Gradients


def test_gradient_groups_cover_every_token_once():
    """Each token of a batch counts once in the reduced gradient of every entry."""
    for sizes in iter_expert_layouts(LARGEST // 2):
        axes, all_coordinates = Axes.from_sizes(0, **sizes), count_coordinates(**sizes)
        for pp_rank in range(sizes["pp"]):
            stage = {rank_id: rank for rank_id, rank in enumerate(all_coordinates) if rank["pp"] == pp_rank}
            shares = sorted((rank["dp"], rank["cp"]) for rank in stage.values() if rank["tp"] == 0)
            tokens = sorted((*share, tp) for share in shares for tp in range(sizes["tp"]))
            for rank_id, rank in stage.items():
                rank_axes = axes.of_rank(rank_id)
                # A tensor-parallel linear sees all tokens of its data- and context-parallel shard.
                batch_shares = [(stage[other]["dp"], stage[other]["cp"]) for other in rank_axes.ranks("dp_cp")]
                assert sorted(batch_shares) == shares and {
                    stage[other]["tp"] for other in rank_axes.ranks("dp_cp")
                } == {rank["tp"]}
                # A norm under sequence parallelism sees a shard of the tokens: its gradient is also summed over tp.
                norm_tokens = [
                    (stage[other]["dp"], stage[other]["cp"], stage[other]["tp"])
                    for through in rank_axes.ranks("dp_cp")
                    for other in axes.of_rank(through).ranks("tp")
                ]
                assert sorted(norm_tokens) == tokens
                # An expert sees the tokens of its ep group; its edp replicas see the others.
                expert_tokens = [
                    (stage[other]["dp"], stage[other]["cp"], stage[other]["tp"])
                    for repetition in rank_axes.ranks("edp")
                    for other in axes.of_rank(repetition).ranks("ep")
                ]
                expected = tokens if sizes["etp"] == 1 else [token for token in tokens if token[2] == rank["tp"]]
                assert sorted(expert_tokens) == expected, (sizes, rank_id)
                assert {(stage[o]["ep"], stage[o]["etp"]) for o in rank_axes.ranks("edp")} == {
                    (rank["ep"], rank["etp"])
                }

"""Who sits where, holds what and sums which gradients, against an oracle that counts ranks one by one."""

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
# The worlds of more than 32 ranks in which every axis takes many sizes.
MANY_DIVISORS = (48, 60, 63, 64)
WORLD = ("tp", "cp", "pp", "dp")


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts():
    """Every tp x cp x pp x dp of up to 64 ranks."""
    for sizes in itertools.product(range(1, LARGEST + 1), repeat=2):
        for pp in range(1, LARGEST // math.prod(sizes) + 1):
            for dp in range(1, LARGEST // (math.prod(sizes) * pp) + 1):
                yield dict(zip(WORLD, (*sizes, pp, dp), strict=True))


def batched(items, length):
    items = list(items)
    return [items[start : start + length] for start in range(0, len(items), length)]


def count(tp, cp, pp, dp, dp_replicate=1, etp=1, ep=1):
    """The coordinates of every rank, by counting."""
    found = []
    for dp_rank, pp_rank, cp_rank, tp_rank in itertools.product(range(dp), range(pp), range(cp), range(tp)):
        found.append({"tp": tp_rank, "cp": cp_rank, "pp": pp_rank, "dp": dp_rank})
    for replica, block in enumerate(batched(range(dp), dp // dp_replicate)):
        for place, dp_rank in enumerate(block):
            for rank in found:
                if rank["dp"] == dp_rank:
                    rank |= {"dp_replicate": replica, "dp_shard": place}
    # Experts: within a stage the ranks are dealt out in the order of their numbers.
    for pp_rank in range(pp):
        stage = [rank for rank in found if rank["pp"] == pp_rank]
        lines = [[rank for rank in stage if rank["tp"] == place] for place in range(tp)] if etp > 1 else [stage]
        for place, line in enumerate(lines):
            for repetition, group in enumerate(batched(line, ep)):
                for expert, rank in enumerate(group):
                    rank |= {"etp": place, "ep": expert, "edp": repetition}
    return found


def groups_along(found, axis, others):
    """The ranks that agree in all other coordinates, in the order of this one."""
    together = {}
    for number, rank in enumerate(found):
        together.setdefault(tuple(rank[name] for name in others), []).append((rank[axis], number))
    return sorted(tuple(number for _, number in sorted(members)) for members in together.values())


def check(sizes, axes, found, names_and_others):
    for name, others in names_and_others.items():
        expected = groups_along(found, name, others)
        assert sorted(axes.groups(name)) == expected, (sizes, name)
        for group in expected:
            for place, rank in enumerate(group):
                own = axes.of_rank(rank)
                assert own.rank(name) == place and own.ranks(name) == group, (sizes, name, rank)
                assert own.neighbour(name) == group[(place + 1) % len(group)]
                assert own.neighbour(name, -1) == group[place - 1]


def test_ranks_sit_where_counting_puts_them():
    checked = 0
    for sizes in layouts():
        check(sizes, Axes.from_sizes(0, **sizes), count(**sizes), {n: [o for o in WORLD if o != n] for n in WORLD})
        checked += 1
    assert checked > 1800


def test_shards_and_their_repetitions():
    for inner, dp in itertools.product(range(1, LARGEST + 1), repeat=2):
        for replicas in divisors(dp) if inner * dp <= LARGEST else ():
            sizes = {"tp": inner, "dp": dp, "dp_replicate": replicas}
            found = count(cp=1, pp=1, **sizes)
            others = {"dp_shard": ["tp", "dp_replicate"], "dp_replicate": ["tp", "dp_shard"]}
            check(sizes, Axes.from_sizes(0, **sizes), found, others)


def fits(tp, cp, dp, etp, ep):
    """Whether each axis is used up before the next is begun."""
    for size in ((tp,) if etp == 1 else ()) + (cp, dp):
        taken = min(size, ep)
        if size % taken or ep % taken:
            return False
        ep //= taken
    return ep == 1


def expert_layouts(largest):
    for sizes in layouts():
        tp, cp, pp, dp = sizes.values()
        if tp * cp * pp * dp > largest:
            continue
        for etp in {1, tp}:
            for ep in divisors(tp * cp * dp // etp):
                if fits(tp, cp, dp, etp, ep):
                    yield sizes | {"etp": etp, "ep": ep}


def test_experts_see_the_same_ranks_in_another_order():
    checked = 0
    for sizes in expert_layouts(LARGEST):
        if sizes["ep"] == 1 and sizes["etp"] == 1:
            continue
        axes, found = Axes.from_sizes(0, **sizes), count(**sizes)
        for name in ("etp", "ep", "edp"):
            others = ["pp", *{"etp", "ep", "edp"} - {name}]
            assert sorted(axes.groups(name)) == groups_along(found, name, others), (sizes, name)
        checked += 1
    assert checked > 3000


def test_sizes_that_do_not_divide_are_refused():
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


# Entries

PLACEMENTS = {
    "whole": Placement(),
    "rows": Placement.split("tp", 0),
    "columns": Placement.split("tp", 1),
    "packed": Placement.split("tp", 0, groups=3),
    "experts": Placement((Split("ep", 0),)),
    "wide experts": Placement((Split("ep", 0), Split("etp", 1))),
}
SHAPE = (12, 7)


def entries(placement, coordinates, sizes):
    """The numbers of the entries that a rank holds, as torch cuts them, flattened."""
    places = tuple((sizes[split.axis], coordinates[split.axis]) for split in placement.splits)
    return _entries(placement, places)


@functools.cache
def _entries(placement, places):
    tensor = torch.arange(math.prod(SHAPE)).view(SHAPE)
    for split, (ranks, rank) in zip(placement.splits, places, strict=True):
        blocks = tensor.chunk(split.groups, split.dim)
        parts = [block.chunk(ranks // split.copies, split.dim) for block in blocks]
        place = rank // split.copies
        tensor = torch.cat([part[place] if place < len(part) else part[0].narrow(split.dim, 0, 0) for part in parts])
        if split.dim == 1:
            assert split.groups == 1
    return tensor.flatten().tolist()


@functools.cache
def contents(boxes):
    tensor = torch.arange(math.prod(SHAPE)).view(SHAPE)
    found = []
    for box in boxes:
        place = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        found.extend(tensor[place].flatten().tolist())
    return found


def part_of(numbers, shards, shard):
    width = math.ceil(len(numbers) / shards)
    return numbers[shard * width : (shard + 1) * width]


def state_of(axes, zero_stage, placement, average):
    config = MegatronConfig(zero_stage=zero_stage)
    shardings = {"weight": ParameterSharding("weight", SHAPE, "", placement, GradientRule(average=average))}
    return ParallelState(config, axes, ModelSpec(""), shardings)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_every_entry_is_held_and_written_by_the_ranks_that_should(zero_stage):
    """Of weights and moments: held as torch cuts them, and written once by all ranks of a stage together."""
    for sizes in expert_layouts(8):
        check_entries(sizes, zero_stage, PLACEMENTS, (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "packed", "wide experts"])
def test_every_entry_in_layouts_of_up_to_64_ranks(name):
    for sizes in expert_layouts(LARGEST):
        # Stages repeat each other: without a cut, who holds what does not ask for them.
        ranks = sizes["tp"] * sizes["cp"] * sizes["dp"]
        if sizes["pp"] > 1 or (ranks > 32 and ranks not in MANY_DIVISORS):
            continue
        check_entries(sizes, 1, {name: PLACEMENTS[name]}, (True,))


def check_entries(sizes, zero_stage, placements, kinds):
    axes, found = Axes.from_sizes(0, **sizes, dp_replicate=None if zero_stage == 0 else 1), count(**sizes)
    for name, placement in placements.items():
        is_expert = "experts" in name
        if (zero_stage == 3 and is_expert) or (is_expert and sizes["etp"] > 1 and name == "experts"):
            # FSDP2's units of experts come with them; experts that etp does not split are not laid out so.
            continue
        average = "edp" if is_expert else "dp_cp"
        shards = axes.size(average)
        for is_moment in kinds:
            written = {}
            for rank, coordinates in enumerate(found):
                shard = coordinates["edp"] if is_expert else coordinates["dp"] * sizes["cp"] + coordinates["cp"]
                state = state_of(axes.of_rank(rank), zero_stage, placement, average)
                held = holding(state, "weight", SHAPE, is_moment=is_moment)
                expected = entries(placement, coordinates, sizes)
                if zero_stage == 1 and is_moment:
                    expected = part_of(expected, shards, shard)
                elif zero_stage == 3 and shards > 1:
                    local = placement.local_shape(SHAPE, axes.of_rank(rank))
                    rows = batched(expected, local[1]) if local[1] else []
                    expected = [number for row in part_of(rows, shards, shard) for number in row]
                assert contents(held.boxes()) == expected, (sizes, name, rank)
                piece = held.share("weight", torch.tensor(expected))
                if piece is not None:
                    assert contents(piece.boxes) == piece.data.tolist()
                    written.setdefault(coordinates["pp"], []).extend(piece.data.tolist())
            for numbers in written.values():
                assert sorted(numbers) == list(range(math.prod(SHAPE))), (sizes, name, is_moment)


# Gradients


def test_every_gradient_is_summed_over_the_ranks_that_should():
    """Each token of a batch counts once in what the owner of an entry ends up with."""
    for sizes in expert_layouts(LARGEST // 2):
        axes, found = Axes.from_sizes(0, **sizes), count(**sizes)
        for pp_rank in range(sizes["pp"]):
            stage = {number: rank for number, rank in enumerate(found) if rank["pp"] == pp_rank}
            shares = sorted((rank["dp"], rank["cp"]) for rank in stage.values() if rank["tp"] == 0)
            tokens = sorted((*share, tp) for share in shares for tp in range(sizes["tp"]))
            for number, rank in stage.items():
                own = axes.of_rank(number)
                # A split linear sees its ranks' share of the batch, whole.
                seen = [(stage[other]["dp"], stage[other]["cp"]) for other in own.ranks("dp_cp")]
                assert sorted(seen) == shares and {stage[other]["tp"] for other in own.ranks("dp_cp")} == {rank["tp"]}
                # A norm between split sequences sees a part of the tokens: summed over tp as well.
                parts = [
                    (stage[other]["dp"], stage[other]["cp"], stage[other]["tp"])
                    for through in own.ranks("dp_cp")
                    for other in axes.of_rank(through).ranks("tp")
                ]
                assert sorted(parts) == tokens
                # An expert sees the tokens of its ep group; those that repeat it see the others.
                with_me = [
                    (stage[other]["dp"], stage[other]["cp"], stage[other]["tp"])
                    for repetition in own.ranks("edp")
                    for other in axes.of_rank(repetition).ranks("ep")
                ]
                expected = tokens if sizes["etp"] == 1 else [token for token in tokens if token[2] == rank["tp"]]
                assert sorted(with_me) == expected, (sizes, number)
                assert {(stage[o]["ep"], stage[o]["etp"]) for o in own.ranks("edp")} == {(rank["ep"], rank["etp"])}

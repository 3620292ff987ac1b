"""Whether what ranks repeat is still equal on all of them: its bits are added up, and who differs from most is named.

What a rank holds has a key: what it is, its name, and which of its entries they are, by the placement. Ranks with equal
keys have to have equal sums. No group is asked who repeats what: keys say it, of any layout.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.ecosystem import strip_adapter_prefix
from ..compat.torch_dtensor import local_tensor, plain_parts
from ..core.communication.rng import default_generator, host_state
from ..core.off_stage import is_off_stage, local_named_parameters
from ..data_parallel.distributed_optimizer import MainParam, sharded, stepping_optimizer
from ..errors import ReplicaError
from ..parallel_state import ParallelState, parallel_state, unwrap_parallel_model

WEIGHT, MAIN_WEIGHT, MOMENT, BUFFER, RANDOM = "weight", "main weight", "moment", "buffer", "random state"
# Integers of as many bytes, by which a tensor's bits are added up.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Entries whose bits are added up at a time.
_BLOCK = 1 << 20
# Differences that an error shows.
_SHOWN = 8

# What it is, its name, and which entries of it.
_Key = tuple[str, str, Hashable]


@dataclass(frozen=True)
class UnequalReplica:
    """Something that ranks repeat and that differs.

    Attributes:
        kind: `"weight"`, `"main weight"`, `"moment"`, `"buffer"` or `"random state"`.
        name: the parameter's or buffer's; of a moment, behind what the optimizer calls it.
        ranks: of the job, those that differ from most; all holders, where no value is that of most of them.
        holders: all ranks that have the same entries.
        alike: of these, those of each value.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    identical: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        if self.ranks == self.holders:
            text = f"{self.kind} {self.name}: ranks {_listed(self.holders)} differ, none of them from most"
            # Of values that several have.
            return text + (
                f": {' against '.join(map(_listed, self.identical))}" if len(self.identical) < len(self.holders) else ""
            )
        named = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{self.kind} {self.name}: {named} {_listed(self.ranks)} of {_listed(self.holders)}"


class ReplicaCheck:
    """Compares what ranks repeat; every rank of the job makes one, and calls it after the same steps.

        check = ReplicaCheck(model, optimizer)
        for step, batch in enumerate(loader):
            ...
            if step % 100 == 0:
                check()

    Args:
        model: laid out, with adapters or without.
        optimizers: of the model, whose main weights and moments are compared too.

    Raises:
        ReplicaError: by `check()`, on all ranks: with the ranks and names of what differs.
    """

    def __init__(self, model: Any, *optimizers: torch.optim.Optimizer):
        self.model, self.optimizers = model, tuple(map(stepping_optimizer, optimizers))
        # What ranks hold changes when a model does; all ranks know the same.
        self._keys: dict[bytes, list[_Key]] = {}

    def __call__(self) -> None:
        """Raises `ReplicaError` where something differs."""
        if found := self.differences():
            lines = [f"  {one}" for one in found[:_SHOWN]]
            lines += [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            raise ReplicaError("\n".join(["What ranks repeat is no longer equal:", *lines]))

    def differences(self) -> list[UnequalReplica]:
        """Returns what differs, the same on every rank, in the order in which ranks hold it."""
        held = [*_held(self.model, self.optimizers)]
        keys = [key for key, _ in held]
        digest = hashlib.blake2b(repr(keys).encode(), digest_size=16).digest()
        of_ranks = _of_all_ranks((digest, _sums([tensor for _, tensor in held])))
        if any(other not in self._keys for other, _ in of_ranks):
            self._keys = dict(_of_all_ranks((digest, keys)))
        values: dict[_Key, dict[int, int]] = {}
        for rank, (other, sums) in enumerate(of_ranks):
            for key, value in zip(self._keys[other], sums, strict=True):
                values.setdefault(key, {})[rank] = value
        return [_unequal(key, ranks) for key, ranks in values.items() if len({*ranks.values()}) > 1]


def _unequal(key: _Key, values: dict[int, int]) -> UnequalReplica:
    """Names the ranks that differ from most."""
    [(usual, count)] = Counter(values.values()).most_common(1)
    apart = [rank for rank, value in values.items() if value != usual]
    is_known = 2 * count > len(values)
    sides: dict[int, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    identical = tuple(map(tuple, sides.values()))
    return UnequalReplica(key[0], key[1], tuple(apart if is_known else values), tuple(values), identical)


def _of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """Sums up the bits of tensors of any shapes; a device is waited for once."""
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    found = [0] * len(sums)
    for device in {value.device for value in sums}:
        places = [place for place, value in enumerate(sums) if value.device == device]
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            found[place] = value
    return found


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Adds up the bits of a tensor of any shape, each entry's times an odd number of its own: moved ones are others."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    done = 0
    for part in plain_parts(tensor):
        bits = part.contiguous().view(_BITS[part.itemsize]).flatten()
        for start in range(0, len(bits), _BLOCK):
            block = bits[start : start + _BLOCK].to(torch.int64)
            factors = torch.arange(1, 2 * len(block), 2, device=block.device)
            # Whole numbers of 64 bits go round.
            total = total + (block * factors).sum() + 2 * done * block.sum()
            done += len(block)
    return total


def _held(model: Any, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[_Key, Tensor]]:
    """Yields what this rank holds that others may hold too."""
    state, inner = parallel_state(model), unwrap_parallel_model(model)
    assert state is not None
    tied = getattr(inner, "all_tied_weights_keys", {})
    places: dict[str, Hashable] = {}
    for outer_name, parameter in local_named_parameters(model):
        if is_off_stage(parameter):
            continue
        name = strip_adapter_prefix(outer_name)
        places[name] = _place(state, name, parameter)
        # Of one weight the name that holds on all stages.
        yield (WEIGHT, tied.get(name, name), places[name]), local_tensor(parameter)
    for number, optimizer in enumerate(optimizers):
        yield from _held_by_optimizer(optimizer, number, places, tied)
    for name, buffer in inner.named_buffers():
        yield (BUFFER, name, None), local_tensor(buffer)
    yield from _random_states(state)


def _place(state: ParallelState, name: str, parameter: nn.Parameter) -> Hashable:
    """Tells which entries of a parameter this rank has."""
    shape = state.shardings[name].shape if name in state.shardings else tuple(parameter.shape)
    intervals = tuple(map(tuple, state.placement(name).intervals(shape, state.axes)))
    # Stage 3 cuts what other axes have left.
    part = state.axes.rank(f"{state.average(name)}_shard") if state.shards(name) else None
    return intervals, part


def _held_by_optimizer(
    optimizer: torch.optim.Optimizer, number: int, places: dict[str, Hashable], tied: dict[str, str]
) -> Iterator[tuple[_Key, Tensor]]:
    of_model = sharded(optimizer)
    leaves: list[MainParam] = [] if of_model is None else of_model.leaves
    for leaf in leaves:
        inner_name = strip_adapter_prefix(leaf.name)
        if inner_name not in places:
            continue
        name, place = tied.get(inner_name, inner_name), (number, places[inner_name], leaf.start, leaf.stop)
        if leaf.separate:
            yield (MAIN_WEIGHT, name, place), leaf.tensor
        for kind, value in sorted(optimizer.state.get(leaf.tensor, {}).items()):
            if isinstance(value, Tensor):
                yield (MOMENT, f"{kind} of {name}", place), local_tensor(value)


def _random_states(state: ParallelState) -> Iterator[tuple[_Key, Tensor]]:
    """Yields the states from which ranks of tp draw alike; stages and shares of a row draw for themselves."""
    place = tuple(state.axes.rank(axis) for axis in ("cp", "pp", "dp"))
    device = state.mesh.device
    generators = {"torch": torch.default_generator} | (
        {device.type: default_generator(device)} if device.type != "cpu" else {}
    )
    for name, generator in generators.items():
        yield (RANDOM, name, place), generator.get_state()
    yield (RANDOM, "of Python and numpy", place), host_state()


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))

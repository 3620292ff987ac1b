"""Checks that replicated state is bitwise equal on all ranks, and reports the ranks that differ from the majority.

Every tensor on a rank has a key: its kind, its name, and its entries according to the placement. Ranks with equal
keys must have equal checksums. The keys alone determine the replicas, so the check works with any layout and needs no
process groups of its own.
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
from ..data_parallel.distributed_optimizer import sharded, stepping_optimizer
from ..data_parallel.main_params import MainParam
from ..errors import ReplicaError
from ..parallel_state import ParallelState, parallel_state, unwrap_parallel_model

WEIGHT, MAIN_WEIGHT, MOMENT, BUFFER, RANDOM = "weight", "main weight", "moment", "buffer", "random state"
# Item size -> integer dtype of that size, for checksums over the bits of a tensor.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of entries per block of a checksum, which bounds the int64 copy.
_BLOCK = 1 << 20
# Number of differences listed in an error.
_SHOWN = 8

# Kind, name, and entries of the full tensor.
_Key = tuple[str, str, Hashable]


@dataclass(frozen=True)
class UnequalReplica:
    """A replicated value that differs between ranks.

    Attributes:
        kind: `"weight"`, `"main weight"`, `"moment"`, `"buffer"` or `"random state"`.
        name: of the parameter or buffer; for a moment, the optimizer's name for it comes first.
        ranks: global ranks that differ from the majority; all holders if no value has a majority.
        holders: all ranks that have the same entries.
        identical: the holders, grouped by value.
    """

    kind: str
    name: str
    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    identical: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        if self.ranks == self.holders:
            text = f"{self.kind} {self.name}: ranks {_listed(self.holders)} differ without a majority"
            # List the groups only if some ranks agree.
            return text + (
                f": {' against '.join(map(_listed, self.identical))}" if len(self.identical) < len(self.holders) else ""
            )
        named = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{self.kind} {self.name}: {named} {_listed(self.ranks)} of {_listed(self.holders)}"


class ReplicaCheck:
    """Compares replicated state across ranks; create one on every rank, and call it after the same steps.

        check = ReplicaCheck(model, optimizer)
        for step, batch in enumerate(loader):
            ...
            if step % 100 == 0:
                check()

    Args:
        model: parallelized, with or without adapters.
        optimizers: of the model; their main weights and moments are compared too.

    Raises:
        ReplicaError: raised by `check()` on all ranks, with the ranks and names of what differs.
    """

    def __init__(self, model: Any, *optimizers: torch.optim.Optimizer):
        self.model, self.optimizers = model, tuple(map(stepping_optimizer, optimizers))
        # Digest of a rank's keys -> the keys. All ranks exchange them together when any digest is new.
        self._keys: dict[bytes, list[_Key]] = {}

    def __call__(self) -> None:
        """Raises `ReplicaError` if a replicated value differs."""
        if differences := self.differences():
            lines = [f"  {one}" for one in differences[:_SHOWN]]
            lines += [f"  and {len(differences) - _SHOWN} more"] if len(differences) > _SHOWN else []
            raise ReplicaError("\n".join(["Replicated values differ between ranks:", *lines]))

    def differences(self) -> list[UnequalReplica]:
        """Returns the differences, identical on every rank, in the order in which ranks hold the tensors."""
        held = [*_held(self.model, self.optimizers)]
        keys = [key for key, _ in held]
        digest = hashlib.blake2b(repr(keys).encode(), digest_size=16).digest()
        of_ranks = _gather_values((digest, _sums([tensor for _, tensor in held])))
        if any(other not in self._keys for other, _ in of_ranks):
            self._keys = dict(_gather_values((digest, keys)))
        values: dict[_Key, dict[int, int]] = {}
        for rank, (other, sums) in enumerate(of_ranks):
            for key, value in zip(self._keys[other], sums, strict=True):
                values.setdefault(key, {})[rank] = value
        return [_unequal(key, ranks) for key, ranks in values.items() if len({*ranks.values()}) > 1]


def _unequal(key: _Key, values: dict[int, int]) -> UnequalReplica:
    """Returns the difference with the ranks that differ from the majority."""
    [(usual, count)] = Counter(values.values()).most_common(1)
    apart = [rank for rank, value in values.items() if value != usual]
    is_known = 2 * count > len(values)
    sides: dict[int, list[int]] = {}
    for rank, value in values.items():
        sides.setdefault(value, []).append(rank)
    identical = tuple(map(tuple, sides.values()))
    return UnequalReplica(key[0], key[1], tuple(apart if is_known else values), tuple(values), identical)


def _gather_values(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """Returns checksums of tensors of any shape; synchronizes with each device once."""
    sums = [_compute_checksum(tensor) for tensor in tensors]
    checksums = [0] * len(sums)
    for device in {value.device for value in sums}:
        places = [place for place, value in enumerate(sums) if value.device == device]
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            checksums[place] = value
    return checksums


def _compute_checksum(tensor: Tensor) -> Tensor:
    """Returns a checksum of a tensor's bits: entry `i` is weighted by `2 * i + 1`, so that moved entries change it."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    done = 0
    for part in plain_parts(tensor):
        bits = part.contiguous().view(_BITS[part.itemsize]).flatten()
        for start in range(0, len(bits), _BLOCK):
            block = bits[start : start + _BLOCK].to(torch.int64)
            factors = torch.arange(1, 2 * len(block), 2, device=block.device)
            # int64 overflow wraps around, which is deterministic.
            total = total + (block * factors).sum() + 2 * done * block.sum()
            done += len(block)
    return total


def _held(model: Any, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[_Key, Tensor]]:
    """Yields the keys and tensors of this rank that others may replicate."""
    state, inner = parallel_state(model), unwrap_parallel_model(model)
    assert state is not None
    tied = getattr(inner, "all_tied_weights_keys", {})
    places: dict[str, Hashable] = {}
    for outer_name, parameter in local_named_parameters(model):
        if is_off_stage(parameter):
            continue
        name = strip_adapter_prefix(outer_name)
        places[name] = _place(state, name, parameter)
        # A tied weight is compared under one name, which is the same on all stages.
        yield (WEIGHT, tied.get(name, name), places[name]), local_tensor(parameter)
    for number, optimizer in enumerate(optimizers):
        yield from _held_by_optimizer(optimizer, number, places, tied)
    for name, buffer in inner.named_buffers():
        yield (BUFFER, name, None), local_tensor(buffer)
    yield from _random_states(state)


def _place(state: ParallelState, name: str, parameter: nn.Parameter) -> Hashable:
    """Returns the entries of a parameter on this rank."""
    shape = state.shardings[name].shape if name in state.shardings else tuple(parameter.shape)
    intervals = tuple(map(tuple, state.placement(name).intervals(shape, state.axes)))
    # ZeRO-3 shards what the other axes leave on this rank.
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
    """Yields the RNG states, which only tensor-parallel ranks share; pp, dp and cp ranks have their own."""
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

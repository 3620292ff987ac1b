"""Hang analysis: compares the flight records of all ranks to find the ranks missing from a collective."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.communication.flight_recorder import FLIGHT_RECORD
from .rank_files import read_rank_files


@dataclass(frozen=True)
class Recorded:
    """A collective that a rank has called.

    Attributes:
        number: sequence number in its group.
        operation: such as `"all_reduce"`.
        sizes: shapes of the inputs.
        dtypes: of the inputs.
    """

    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        inputs = ", ".join(f"{dtype}{list(size)}" for dtype, size in zip(self.dtypes, self.sizes, strict=False))
        return f"{self.operation}({inputs})"


@dataclass(frozen=True)
class FlightRecord:
    """The collectives that one rank has called.

    Attributes:
        rank, ranks (`int`): this rank and the world size.
        steps (`int`): optimizer steps so far.
        waits (*optional*): call in which the main thread was blocked.
        calls: (axis name, ranks of the group) -> its collectives by sequence number.
    """

    rank: int
    ranks: int
    steps: int
    waits: str | None
    calls: Mapping[tuple[str, tuple[int, ...]], Mapping[int, Recorded]]


@dataclass(frozen=True)
class Discord:
    """A collective that some ranks of its group have not called, or called with other operations or dtypes.

    Attributes:
        axis, ranks: of the group.
        number: sequence number of the collective.
        called: rank -> its call.
        missing: ranks that did not call it.
        last: missing rank -> its last call.
    """

    axis: str
    ranks: tuple[int, ...]
    number: int
    called: Mapping[int, Recorded]
    missing: tuple[int, ...]
    last: Mapping[int, Recorded]

    def __str__(self) -> str:
        group = f"{self.axis or 'a group'} of ranks {_listed(self.ranks)}"
        kinds: dict[str, list[int]] = {}
        for rank, call in self.called.items():
            kinds.setdefault(str(call), []).append(rank)
        if not self.missing:
            parts = "; ".join(f"{call} on {_ranks(ranks)}" for call, ranks in kinds.items())
            return f"{group}: collective {self.number} differs: {parts}"
        [(waited, waiting), *_] = kinds.items()
        lasts = ", ".join(f"{_ranks([rank])} last called {call}" for rank, call in self.last.items())
        text = f"{group}: {_ranks(self.missing)} did not reach collective {self.number}, {waited}"
        return f"{text}, in which {_ranks(waiting)} wait{'' if len(waiting) > 1 else 's'}" + (
            f" ({lasts})" if lasts else ""
        )


def read_flight_records(directory: str | os.PathLike[str]) -> list[FlightRecord]:
    """Reads the records of all ranks written by `write_flight_record`.

    Raises:
        ConfigError: there are none.
    """
    return read_rank_files(Path(directory), FLIGHT_RECORD, _record)


def _record(values: dict[str, Any]) -> FlightRecord:
    calls: dict[tuple[str, tuple[int, ...]], dict[int, Recorded]] = {}
    for entry in values["entries"]:
        name, description = entry["process_group"]
        if entry["is_p2p"] or name not in values["groups"]:
            continue
        key = description.removeprefix("mesh_").removesuffix("_pg"), tuple(values["groups"][name])
        operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        sizes = tuple(map(tuple, entry["input_sizes"]))
        call = Recorded(entry["collective_seq_id"], operation, sizes, tuple(entry["input_dtypes"]))
        calls.setdefault(key, {})[call.number] = call
    return FlightRecord(values["rank"], values["ranks"], values["steps"], values["waits"], calls)


def find_discords(records: Sequence[FlightRecord]) -> list[Discord]:
    """Returns, per group, the first collective that not all of its ranks called identically; empty if none differ.

    Ranks without a record are ignored.
    """
    return [
        discord for key in dict.fromkeys(key for one in records for key in one.calls) for discord in _of(key, records)
    ]


def _of(key: tuple[str, tuple[int, ...]], records: Sequence[FlightRecord]) -> Iterator[Discord]:
    axis, ranks = key
    calls = {one.rank: one.calls.get(key, {}) for one in records if one.rank in ranks}
    if len(calls) < 2:
        return
    # Calls older than the start of a ring buffer were made by every rank that still has them.
    first = max((min(rank_calls) for rank_calls in calls.values() if rank_calls), default=0)
    for number in range(first, max(max(rank_calls, default=0) for rank_calls in calls.values()) + 1):
        called = {rank: rank_calls[number] for rank, rank_calls in calls.items() if number in rank_calls}
        missing = tuple(rank for rank in calls if rank not in called)
        # Input sizes may differ between ranks in a gather or scatter, so compare operations and dtypes only.
        if missing or len({(call.operation, call.dtypes) for call in called.values()}) > 1:
            last = {rank: calls[rank][max(calls[rank])] for rank in missing if calls[rank]}
            yield Discord(axis, ranks, number, called, missing, last)
            return


def tell_hang(records: Sequence[FlightRecord]) -> str:
    """Returns a report of the mismatched collectives, and the call in which each rank was blocked."""
    lines = [str(discord) for discord in find_discords(records)] or [
        "all ranks with a record called the same collectives"
    ]
    if missing := sorted({*range(records[0].ranks)} - {one.rank for one in records}):
        lines.append(f"{_ranks(missing)}: no record; they had ended, or did not hang")
    for one in records:
        lines.append(f"rank {one.rank}: after {one.steps} optimizer steps, in {one.waits or 'no collective'}")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

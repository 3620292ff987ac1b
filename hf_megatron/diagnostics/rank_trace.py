"""Per-rank trace of a step: computation and communication, stored in one file per rank."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .rank_files import rank_file, read_rank_files, write_rank_file

TRACE = "trace"


@dataclass
class Communication:
    """One call of a process group.

    Attributes:
        axis: mesh axis of the group, such as `"tp"`, or the group's name.
        operation: such as `"allreduce"`.
        ranks: global ranks that participate; for a send and its receive these two, sender first.
        number: number of earlier calls by these ranks with this group.
        start: when this rank issued the call.
        waits: `[start, stop)` intervals in which this rank waited for it.
    """

    axis: str
    operation: str
    ranks: tuple[int, ...]
    number: int
    start: float
    waits: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class RankTrace:
    """A step of one rank, in seconds of its own clock.

    Attributes:
        rank, ranks (`int`): this rank and the world size.
        layout (`str`): of the model.
        offset: time by which this clock is ahead of rank 0's.
        start, stop: of the step.
        computed: names of operations and their `[start, stop)`.
        communications: in call order.
        overlaps: whether communication may overlap with computation, as on accelerators.
        queued: seconds in which the host ran other processes instead of this rank.
    """

    rank: int
    ranks: int
    layout: str
    offset: float
    start: float
    stop: float
    computed: list[tuple[str, float, float]]
    communications: list[Communication]
    overlaps: bool = False
    queued: float = 0.0

    def write(self, directory: Path) -> None:
        """Writes `rank{N}.json`."""
        write_rank_file(rank_file(directory, self.rank), TRACE, asdict(self))

    @classmethod
    def of(cls, values: dict[str, Any]) -> "RankTrace":
        """Returns the trace from the contents of a file that `write` wrote."""
        calls = [
            Communication(**{**call, "ranks": tuple(call["ranks"]), "waits": [tuple(wait) for wait in call["waits"]]})
            for call in values["communications"]
        ]
        return cls(**{**values, "computed": [tuple(span) for span in values["computed"]], "communications": calls})


def traces_in(directory: str | os.PathLike[str]) -> Sequence[RankTrace]:
    """Reads the traces of all ranks of a job from a folder, in rank order.

    Raises:
        ConfigError: there are none, or some ranks are missing.
    """
    traces = read_rank_files(Path(directory), TRACE, RankTrace.of)
    if missing := sorted({*range(traces[0].ranks)} - {one.rank for one in traces}):
        raise ConfigError(f"{str(directory)!r}: the traces of ranks {', '.join(map(str, missing))} are missing.")
    return traces

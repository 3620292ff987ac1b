"""What a rank did in a step, as a file of its own."""

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
        axis: that the group lies along, such as `"tp"`, or its name.
        operation: such as `"allreduce"`.
        ranks: of the job, who take part: two for a send and its receive, sender first.
        number: how many calls of these ranks with this group came before.
        start: when this rank asked for it.
        waits: `[start, stop)` of this rank's waiting for it.
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
        rank, ranks (`int`): of the job.
        layout (`str`): of the model.
        offset: by which this clock is ahead of the first rank's.
        start, stop: of the step.
        computed: what, and `[start, stop)`.
        communications: in the order of their calls.
        overlaps: whether communication may run beside computing, as on accelerators.
        queued: seconds in which the host ran others in this rank's place.
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
    def of(cls, said: dict[str, Any]) -> "RankTrace":
        """Makes one of what `write` wrote."""
        calls = [
            Communication(**{**call, "ranks": tuple(call["ranks"]), "waits": [tuple(wait) for wait in call["waits"]]})
            for call in said["communications"]
        ]
        return cls(**{**said, "computed": [tuple(span) for span in said["computed"]], "communications": calls})


def traces_in(directory: str | os.PathLike[str]) -> Sequence[RankTrace]:
    """Reads the traces of all ranks of a job from a folder, in their order.

    Raises:
        ConfigError: there are none, or some ranks' are missing.
    """
    found = read_rank_files(Path(directory), TRACE, RankTrace.of)
    if missing := sorted({*range(found[0].ranks)} - {one.rank for one in found}):
        raise ConfigError(f"{str(directory)!r}: the traces of ranks {', '.join(map(str, missing))} are missing.")
    return found

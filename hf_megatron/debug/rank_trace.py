"""What a rank did in a step, as a file of its own."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..files.paths import replace_file


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

    def write(self, directory: Path) -> None:
        """Writes `rank{N}.json`."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self))
        replace_file(directory / f"rank{self.rank:05}.json", lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, path: Path) -> "RankTrace":
        """Reads what `write` wrote."""
        said = json.loads(path.read_text(encoding="utf-8"))
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
    found = [RankTrace.read(path) for path in sorted(Path(directory).glob("rank*.json"))]
    if not found:
        raise ConfigError(f"{str(directory)!r}: has no rank*.json of StepTrace.")
    if missing := sorted({*range(found[0].ranks)} - {one.rank for one in found}):
        raise ConfigError(f"{str(directory)!r}: the traces of ranks {', '.join(map(str, missing))} are missing.")
    return found

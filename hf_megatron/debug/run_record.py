"""What a run leaves in a folder for its page: layout, logs, slow ranks, a step's memory and another one's trace."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.paths import replace_file
from .rank_trace import RankTrace, traces_in
from .step_memory import MeasuredMemory, memory_in

_RUN, _LOGS, _STRAGGLERS, _MEMORY, _TRACE = "run.json", "logs.jsonl", "stragglers.jsonl", "memory", "trace"


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run when it begins.

    Attributes:
        model: class of the model.
        parameters: of it.
        layout: of the model.
        ranks (`int`): of the job.
        axes: axis -> its size, the outermost first.
        places: of each rank, its place on each of these.
        hosts: of each rank.
        device: kind of it, and its memory in bytes where it says it.
        versions: package -> version.
        started: seconds of `time.time()`.
    """

    model: str
    parameters: int
    layout: str
    ranks: int
    axes: dict[str, int]
    places: list[list[int]]
    hosts: list[str]
    device: str
    device_bytes: int | None
    versions: dict[str, str]
    started: float

    def write(self, directory: Path) -> None:
        """Writes them."""
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self))
        replace_file(directory / _RUN, lambda path: path.write_text(text, encoding="utf-8"))


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it.

    Attributes:
        facts: of its beginning.
        logs: what Trainer logged, by steps; of steps that were taken twice the later ones.
        stragglers: reports.
        memory, traces: of ranks, where they were recorded.
    """

    facts: RunFacts
    logs: list[dict[str, Any]]
    stragglers: list[str] = field(default_factory=list)
    memory: list[MeasuredMemory] = field(default_factory=list)
    traces: Sequence[RankTrace] = ()

    def series(self, name: str) -> list[tuple[float, float]]:
        """Returns (step, value) of what was logged under a name."""
        return [(one["step"], one[name]) for one in self.logs if isinstance(one.get(name), int | float)]


def memory_folder(directory: Path) -> Path:
    """Names the folder of a step's memory."""
    return directory / _MEMORY


def trace_folder(directory: Path) -> Path:
    """Names the folder of a step's trace."""
    return directory / _TRACE


def add_logs(directory: Path, logs: dict[str, Any]) -> None:
    """Adds a line to what was logged."""
    _add(directory / _LOGS, logs)


def add_straggler(directory: Path, step: int, text: str) -> None:
    """Adds a report of a slow rank."""
    _add(directory / _STRAGGLERS, {"step": step, "text": text})


def _add(path: Path, values: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=str) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            # The last one of a run that was killed while it wrote.
            continue
    return found


def read_run(directory: str | os.PathLike[str]) -> RunRecord:
    """Reads a run's folder.

    Raises:
        ConfigError: it has none.
    """
    folder = Path(directory)
    if not (folder / _RUN).exists():
        raise ConfigError(f"{str(directory)!r}: has no {_RUN} of RunCallback.")
    facts = RunFacts(**json.loads((folder / _RUN).read_text(encoding="utf-8")))
    by_step: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in _lines(folder / _LOGS):
        # An evaluation is logged beside its step.
        by_step[line["step"], "loss" in line] = line
    logs = [by_step[key] for key in sorted(by_step)]
    return RunRecord(
        facts,
        logs,
        [line["text"] for line in _lines(folder / _STRAGGLERS)],
        memory_in(memory_folder(folder)) if memory_folder(folder).exists() else [],
        traces_in(trace_folder(folder)) if trace_folder(folder).exists() else (),
    )

"""What a run leaves in a folder for its page: layout, logs, slow ranks, a step's memory and another one's trace."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import MegatronConfig
from ..errors import ConfigError
from .rank_files import read_json, write_rank_file
from .rank_trace import RankTrace, traces_in
from .step_memory import MeasuredMemory, memory_in

_RUN, _LOGS, _STRAGGLERS, _SKIPPED, _MEMORY, _TRACE = (
    "run.json",
    "logs.jsonl",
    "stragglers.jsonl",
    "skipped.jsonl",
    "memory",
    "trace",
)
_KIND = "run"


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
        write_rank_file(directory / _RUN, _KIND, asdict(self))


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it.

    Attributes:
        facts: of its beginning.
        logs: what Trainer logged, by steps; of steps that were taken twice the later ones.
        stragglers: reports.
        skipped: steps that were skipped for gradients that are not finite.
        memory, traces: of ranks, where they were recorded.
        notes: what of these is not there or of another layout.
    """

    facts: RunFacts
    logs: list[dict[str, Any]]
    stragglers: list[str] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    memory: list[MeasuredMemory] = field(default_factory=list)
    traces: Sequence[RankTrace] = ()
    notes: list[str] = field(default_factory=list)

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


def add_skipped(directory: Path, step: int) -> None:
    """Adds a step that was skipped."""
    _add(directory / _SKIPPED, {"step": step})


def why_not_another(directory: Path, step: int) -> str:
    """Returns why a run cannot be recorded into a folder, or nothing: one that goes on can, where it was.

    Args:
        step (`int`): that it begins with.
    """
    if step == 0 and (directory / _LOGS).exists():
        return f"{directory}: has a run already, and this one begins anew; name another folder."
    return ""


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
        raise ConfigError(f"{str(directory)!r}: has no file {_RUN}, which RunCallback writes.")
    facts = read_json(folder / _RUN, _KIND, lambda said: RunFacts(**said))
    by_step: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    for line in _lines(folder / _LOGS):
        # Evaluations and the summary at the end are logged beside a step.
        by_step[line["step"], tuple(sorted(line))] = line
    logs = [by_step[key] for key in sorted(by_step)]
    notes: list[str] = []
    memory = _there(memory_folder(folder), memory_in, "memory", facts, notes)
    traces = _there(trace_folder(folder), traces_in, "trace", facts, notes)
    skipped = sorted({line["step"] for line in _lines(folder / _SKIPPED)})
    stragglers = [line["text"] for line in _lines(folder / _STRAGGLERS)]
    return RunRecord(facts, logs, stragglers, skipped, list(memory), traces, notes)


def _there(
    folder: Path, read: Callable[[Path], Sequence[Any]], name: str, facts: RunFacts, notes: list[str]
) -> Sequence[Any]:
    """Returns what ranks recorded, and notes what of it is missing: a run may have been killed meanwhile."""
    if not folder.exists():
        return ()
    try:
        found = read(folder)
    except ConfigError as error:
        notes.append(f"No {name}: {error}")
        return ()
    if len(found) < found[0].ranks:
        notes.append(f"The {name} is of {len(found)} of {found[0].ranks} ranks.")
    layout = found[0].layout
    of = layout if isinstance(layout, str) else MegatronConfig.from_saved(_as_fields(layout)).layout()
    if (of, found[0].ranks) != (facts.layout, facts.ranks):
        notes.append(f"The {name} is of {found[0].ranks} ranks with {of}, before the run went on with {facts.layout}.")
    return found


def _as_fields(layout: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in layout.items()}

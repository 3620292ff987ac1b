"""Files that a run writes for its report: layout, logs, slow ranks, one step's memory, and another step's trace."""

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
    """Metadata known when a run begins.

    Attributes:
        model: class of the model.
        parameters: number of its parameters.
        layout: of the model.
        ranks (`int`): world size.
        axes: axis -> size, outermost first.
        places: for each rank, its coordinates on these axes.
        hosts: for each rank.
        device, device_bytes: name of the device, and its memory in bytes if known.
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
        """Writes the metadata into a run's folder."""
        write_rank_file(directory / _RUN, _KIND, asdict(self))


@dataclass(frozen=True)
class RunRecord:
    """A run as read from its folder.

    Attributes:
        facts: metadata from the start of the run.
        logs: values that Trainer logged, by step; for repeated steps the later values.
        stragglers: reports of slow ranks.
        skipped: steps that were skipped because of non-finite gradients.
        memory, traces: of the ranks, if recorded.
        notes: memory or traces that are missing, incomplete, or from another layout.
    """

    facts: RunFacts
    logs: list[dict[str, Any]]
    stragglers: list[str] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    memory: list[MeasuredMemory] = field(default_factory=list)
    traces: Sequence[RankTrace] = ()
    notes: list[str] = field(default_factory=list)

    def series(self, name: str) -> list[tuple[float, float]]:
        """Returns the (step, value) pairs logged under a name."""
        return [(one["step"], one[name]) for one in self.logs if isinstance(one.get(name), int | float)]


def memory_folder(directory: Path) -> Path:
    """Returns the folder of a step's memory."""
    return directory / _MEMORY


def trace_folder(directory: Path) -> Path:
    """Returns the folder of a step's trace."""
    return directory / _TRACE


def add_logs(directory: Path, logs: dict[str, Any]) -> None:
    """Appends a line to the logs."""
    _add(directory / _LOGS, logs)


def add_straggler(directory: Path, step: int, text: str) -> None:
    """Appends a report of a slow rank."""
    _add(directory / _STRAGGLERS, {"step": step, "text": text})


def add_skipped(directory: Path, step: int) -> None:
    """Appends a skipped step."""
    _add(directory / _SKIPPED, {"step": step})


def why_not_another(directory: Path, step: int) -> str:
    """Returns why a run cannot be recorded into a folder; empty if it can, as when it resumes the folder's run.

    Args:
        step (`int`): first step of the run.
    """
    if step == 0 and (directory / _LOGS).exists():
        return f"{directory}: the folder already has a run, and this one starts at step 0; choose another folder."
    return ""


def _add(path: Path, values: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=str) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            # A run killed while writing leaves an incomplete last line.
            continue
    return records


def read_run(directory: str | os.PathLike[str]) -> RunRecord:
    """Reads a run's folder.

    Raises:
        ConfigError: the folder has no run.
    """
    folder = Path(directory)
    if not (folder / _RUN).exists():
        raise ConfigError(f"{str(directory)!r}: has no file {_RUN}, which RunCallback writes.")
    facts = read_json(folder / _RUN, _KIND, lambda said: RunFacts(**said))
    by_step: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    for line in _lines(folder / _LOGS):
        # Evaluations and the final summary are logged for the same step, with other keys.
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
    """Returns the records of the ranks, and notes what is missing: the run may have been killed while recording."""
    if not folder.exists():
        return ()
    try:
        records = read(folder)
    except ConfigError as error:
        notes.append(f"No {name}: {error}")
        return ()
    if len(records) < records[0].ranks:
        notes.append(f"The {name} covers {len(records)} of {records[0].ranks} ranks.")
    layout = records[0].layout
    of = layout if isinstance(layout, str) else MegatronConfig.from_saved(_as_fields(layout)).layout()
    if (of, records[0].ranks) != (facts.layout, facts.ranks):
        notes.append(
            f"The {name} is from {records[0].ranks} ranks with {of}, before the run continued with {facts.layout}."
        )
    return records


def _as_fields(layout: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in layout.items()}

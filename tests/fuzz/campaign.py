"""Fuzzing campaign: runs numbered cases, logs one line per case, and shrinks failures to reproduction scripts."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hf_megatron.errors import ConfigError
from tests.fuzz.cases import LAYOUTS, draw_case
from tests.fuzz.judging import ACCEPTED
from tests.fuzz.models import MODELS
from tests.fuzz.patterns import LOOP_PATTERNS
from tests.fuzz.runner import run_cases
from tests.fuzz.script import reproduction
from tests.fuzz.shrinking import shrink

# Number of cases drawn at a time, so that many share a fork.
_DRAWN = 48


def read_log(file: Path) -> list[dict[str, Any]]:
    """Reads a log and skips a line truncated by a kill."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        if line.endswith("}"):
            rows.append(json.loads(line))
    return rows


def _iter_numbers(done: set[int], cases: int | None) -> Iterator[int]:
    number = 0
    while cases is None or number < cases:
        if number not in done:
            yield number
        number += 1


def run_campaign(
    *,
    seed: int = 0,
    cases: int | None = 100,
    minutes: float | None = None,
    log: Path | None = None,
    only: Sequence[str] = (),
    layouts: Sequence[str] = (),
    scripts: Path | None = None,
    timeout: float = 20.0,
    shrinks: bool = True,
    echo: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Compares random cases with single-process runs; returns a row for each case run now.

    Args:
        seed (`int`): seed of the cases; a case depends only on it and on its number.
        cases (`int`, *optional*): number of cases after which the run ends.
        minutes (`float`, *optional*): time after which the run ends.
        log (`Path`, *optional*): file of JSON lines to append to; cases in it are not run again.
        only: model types and loop patterns to draw from.
        layouts: layouts to draw from, such as `"tp2"` and `"dp2+zero3"`.
        scripts (`Path`, *optional*): folder for reproduction scripts, which are printed without one.
        timeout (`float`): seconds per case.
        shrinks (`bool`): shrinks failing cases.

    Raises:
        ConfigError: unknown name in `only` or `layouts`.
    """
    for names, allowed, what in ((only, {*MODELS, *LOOP_PATTERNS}, "only"), (layouts, set(LAYOUTS), "layouts")):
        if wrong := [name for name in names if name not in allowed]:
            raise ConfigError(f"{what}: {wrong[0]!r} is none of {', '.join(sorted(allowed))}.")
    done = {row["number"] for row in read_log(log) if row["seed"] == seed} if log else set()
    numbers, end = _iter_numbers(done, cases), time.monotonic() + 60 * minutes if minutes else None
    rows: list[dict[str, Any]] = []
    while end is None or time.monotonic() < end:
        drawn = [(number, draw_case(seed, number, only, layouts)) for number in islice(numbers, _DRAWN)]
        if not drawn:
            break
        by_place = {id(case): number for number, case in drawn}
        for case, result in run_cases([case for _, case in drawn], timeout):
            row = {"seed": seed, "number": by_place[id(case)], "case": case} | result
            row.pop("traceback", None)
            rows.append(row)
            if row["judgment"] not in ACCEPTED:
                _report(row, scripts, timeout, shrinks, echo)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    counts = Counter(row["judgment"] for row in rows)
    echo(f"{len(rows)} cases: " + ", ".join(f"{count} {judgment}" for judgment, count in counts.most_common()))
    return rows


def one_line(case: dict[str, Any]) -> str:
    """Formats a case in one line."""
    layout = "+".join(f"{name}={value}" for name, value in case["layout"].items())
    words = (case["type"], case["task"], case["dtype"], layout, case["loop"], case["way"])
    return " ".join((*words, " & ".join(case["loop_patterns"])))


def _report(
    row: dict[str, Any], scripts: Path | None, timeout: float, shrinks: bool, echo: Callable[[str], Any]
) -> None:
    echo(f"case {row['number']}: {row['judgment']}: {row['worst']}\n    {one_line(row['case'])}")
    if not shrinks:
        return
    row["shrunk"] = shrink(row["case"], row["judgment"], timeout)
    [(_, result)] = run_cases([row["shrunk"]], timeout)
    text = reproduction(row["shrunk"], result, result.get("norm", 1.0))
    echo(f"    shrunk: {one_line(row['shrunk'])}")
    if scripts is None:
        echo(text)
        return
    scripts.mkdir(parents=True, exist_ok=True)
    file = scripts / f"case_{row['seed']}_{row['number']}.py"
    file.write_text(text, encoding="utf-8")
    echo(f"    {file}")

"""Wall and CPU seconds of every test, including its forked and launched processes.

    python -m pytest --costs=costs.json
    python -m tests.helpers.costs costs.json          # prints the slowest files and tests
    python -m tests.helpers.costs costs.json --keep   # records the times of slow tests in tests/costs.json

`tests/costs.json` has the seconds of slow test functions; `--slow-part` uses them to balance its parts.

A run prints its total time and the share of the machine that other processes used. If that share is large, the times
are unreliable.

The cost of a module-scoped fixture counts toward the first test that requests it. The cost of a child process counts
once it has ended and was waited for, by this process or by one of its children.
"""

import json
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_KEY = "costs"
_LAST = pytest.StashKey[tuple[float, float, float]]()
_STARTED = pytest.StashKey[tuple[float, float]]()
_costs: dict[str, dict[str, list[float]]] = {}
# CPU seconds that each worker spends on start-up and collection, outside of tests.
_START_SECONDS = 25
_MAX_OTHER_SHARE = 0.15
COSTS_FILE = Path(__file__).parents[1] / "costs.json"
# Assumed seconds per case of a function without a record.
_DEFAULT_CASE_SECONDS = 0.5
# Faster functions are not recorded.
_MIN_SECONDS = 5


def _read_times():
    process, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), process.ru_utime + process.ru_stime, children.ru_utime + children.ru_stime


def _read_busy_seconds():
    """Returns the busy seconds of all cores, over all processes of the machine."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def pytest_sessionstart(session):
    session.config.stash[_STARTED] = time.monotonic(), _read_busy_seconds()


def pytest_terminal_summary(terminalreporter, config):
    wall, busy = (
        now - then for now, then in zip((time.monotonic(), _read_busy_seconds()), config.stash[_STARTED], strict=True)
    )
    tests = sum(process + children for phases in _costs.values() for _, process, children in phases.values())
    workers = max(1, config.getoption("numprocesses", None) or 1)
    others = max(0.0, busy - tests - _START_SECONDS * workers) / (wall * os.cpu_count())
    text = f"{wall / 60:.1f} minutes, {tests / 60:.1f} of CPU in tests; others used {others:.0%} of the machine"
    terminalreporter.section("time")
    terminalreporter.write_line(text + (": disturbed, these times say little" if others > _MAX_OTHER_SHARE else ""))


def pytest_addoption(parser):
    parser.addoption("--costs", metavar="FILE", help="write wall and CPU seconds of every test to a JSON file")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash[_LAST] = _read_times()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    before, item.stash[_LAST] = item.stash[_LAST], _read_times()
    spent = [round(b - a, 3) for a, b in zip(before, item.stash[_LAST], strict=True)]
    report.user_properties = [*report.user_properties, (_KEY, spent)]
    return report


def pytest_runtest_logreport(report):
    # With xdist, the controller process receives the workers' reports here.
    for name, spent in report.user_properties:
        if name == _KEY:
            _costs.setdefault(report.nodeid, {})[report.when] = spent


def pytest_sessionfinish(session):
    path = session.config.getoption("--costs")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).write_text(json.dumps(_costs, indent=0))


def print_summary(path, count=25):
    costs = json.loads(Path(path).read_text())
    tests = {name: [sum(column) for column in zip(*phases.values(), strict=True)] for name, phases in costs.items()}
    files = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for name, spent in tests.items():
        row = files[name.partition("::")[0]]
        row[0] += 1
        for index, seconds in enumerate(spent):
            row[index + 1] += seconds
    total = [sum(column) for column in zip(*files.values(), strict=True)]
    print("tests    wall     own  children")
    for name, row in [*sorted(files.items(), key=lambda item: -item[1][1]), ("all", total)]:
        print(f"{row[0]:5d} {row[1]:7.1f} {row[2]:7.1f} {row[3]:9.1f}  {name}")
    for name, spent in sorted(tests.items(), key=lambda item: -item[1][0])[:count]:
        print(f"      {spent[0]:7.1f} {spent[1]:7.1f} {spent[2]:9.1f}  {name}")


def split_by_cost(functions: Mapping[str, int], parts: int) -> Sequence[set[str]]:
    """Splits functions into parts of about equal total time.

    Args:
        functions: Number of cases of each function.
        parts: Number of parts.
    """
    recorded = json.loads(COSTS_FILE.read_text(encoding="utf-8"))
    costs = {name: recorded.get(name, _DEFAULT_CASE_SECONDS * cases) for name, cases in functions.items()}
    groups: list[set[str]] = [set() for _ in range(parts)]
    seconds = [0.0] * parts
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        lightest = seconds.index(min(seconds))
        groups[lightest].add(name)
        seconds[lightest] += costs[name]
    return groups


def record_costs(path):
    """Merges the seconds per function of a run of slow tests into `tests/costs.json`."""
    totals: Counter[str] = Counter()
    for name, phases in json.loads(Path(path).read_text()).items():
        totals[name.partition("[")[0]] += sum(wall for wall, _, _ in phases.values())
    recorded = json.loads(COSTS_FILE.read_text(encoding="utf-8")) if COSTS_FILE.exists() else {}
    costs = sorted((recorded | {name: round(seconds) for name, seconds in totals.items()}).items())
    slow = {name: seconds for name, seconds in costs if seconds >= _MIN_SECONDS}
    COSTS_FILE.write_text(json.dumps(slow, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record_costs(sys.argv[1]) if "--keep" in sys.argv else print_summary(*sys.argv[1:2], *map(int, sys.argv[2:3]))

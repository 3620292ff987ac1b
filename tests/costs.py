"""Where the suite's time goes: wall and CPU seconds of every test, its forks and launches included.

    python -m pytest --costs=costs.json
    python -m tests.costs costs.json          # the dearest files and tests

What a module's fixture costs is counted with the first test that asks for it. Children are counted when they have
ended and were waited for, by this process or by a child of it.
"""

import json
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

_KEY = "costs"
_LAST = pytest.StashKey[tuple[float, float, float]]()
_costs: dict[str, dict[str, list[float]]] = {}


def _now():
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def pytest_addoption(parser):
    parser.addoption("--costs", metavar="FILE", help="write wall and CPU seconds of every test to a JSON file")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    item.stash[_LAST] = _now()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    before, item.stash[_LAST] = item.stash[_LAST], _now()
    spent = [round(b - a, 3) for a, b in zip(before, item.stash[_LAST], strict=True)]
    report.user_properties = [*report.user_properties, (_KEY, spent)]
    return report


def pytest_runtest_logreport(report):
    # Under xdist the workers' reports arrive here in the process that started them.
    for name, spent in report.user_properties:
        if name == _KEY:
            _costs.setdefault(report.nodeid, {})[report.when] = spent


def pytest_sessionfinish(session):
    path = session.config.getoption("--costs")
    if path and not hasattr(session.config, "workerinput"):
        Path(path).write_text(json.dumps(_costs, indent=0))


def summarise(path, count=25):
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


if __name__ == "__main__":
    summarise(*sys.argv[1:2], *map(int, sys.argv[2:3]))

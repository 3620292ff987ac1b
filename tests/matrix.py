"""First tier of tests on supported library versions: `python -m tests.matrix FOLDER [combination ...]`.

Each combination has a separate environment in the folder, which is reused. The outcome of each test is recorded there
as soon as it ends, so that an interrupted run can resume. `tests/matrix.json` has the counts, and docs/versions.md
shows them, with the number of tests run if the first tier is incomplete.

    python -m tests.matrix FOLDER                       # all combinations; needs each Python on the path
    python -m tests.matrix FOLDER oldest --minutes 20   # one combination with a time limit
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.structure import ROOT

DATA = ROOT / "tests" / "matrix.json"
NEWEST: Mapping[str, str] = MappingProxyType(
    {"torch": "2.15", "transformers": "5.24", "accelerate": "1.15", "trl": "1.16", "peft": "0.21"}
    | {"sentence_transformers": "6.2"}
)
OLDEST: Mapping[str, str] = MappingProxyType(
    {"torch": "2.11", "transformers": "5.21", "accelerate": "1.13", "trl": "1.14", "peft": "0.20"}
    | {"sentence_transformers": "6.0"}
)
MIDDLE: Mapping[str, str] = MappingProxyType(
    {"torch": "2.12", "transformers": "5.22", "accelerate": "1.14", "trl": "1.15", "peft": "0.20"}
    | {"sentence_transformers": "6.1"}
)
# Every supported version is in at least one combination.
COMBINATIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "newest": {**NEWEST, "python": "3.13"},
        "python 3.14": {**NEWEST, "python": "3.14"},
        "torch 2.14": {**NEWEST, "torch": "2.14", "python": "3.11"},
        "torch 2.13": {**NEWEST, "torch": "2.13", "transformers": "5.23", "python": "3.11"},
        "middle": {**MIDDLE, "python": "3.12"},
        "oldest": {**OLDEST, "python": "3.11"},
    }
)
INDEX = ("--retries", "0", "--extra-index-url", "https://download.pytorch.org/whl/cpu")

# pytest plugin: `-p tests.matrix --outcomes FILE`


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, help="a file of what each test gave; those it names are not run again")
    parser.addoption("--until", type=float, default=float("inf"), help="seconds since 1970 after which no test begins")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Writes the ids of the tests selected by `-m`, and deselects those with a recorded outcome."""
    file = config.getoption("outcomes")
    if file is None:
        return
    recorded_tests = outcomes(file)
    file.with_suffix(".tests").write_text(json.dumps([item.nodeid for item in items]), encoding="utf-8")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in recorded_tests])
    items[:] = [item for item in items if item.nodeid not in recorded_tests]


def pytest_runtest_logreport(report):
    """Records the outcome of a test's call, and failures and skips in setup and teardown."""
    if report.when == "call" or report.outcome != "passed":
        _new_outcomes.append({"test": report.nodeid, "outcome": report.outcome})


_new_outcomes: list[dict[str, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    result = yield
    file = item.config.getoption("outcomes")
    if file is not None:
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in _new_outcomes)
        if time.time() > item.config.getoption("until"):
            item.session.shouldstop = "its time is over"
    _new_outcomes.clear()
    return result


def outcomes(file: Path) -> dict[str, str]:
    """Returns the last outcome of each test; a failure is never overwritten."""
    results: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        if results.get(row["test"]) != "failed":
            results[row["test"]] = row["outcome"]
    return results


# Command line


def prepare_environment(name: str, folder: Path) -> Path:
    """Returns the interpreter of a combination's environment, after installing its packages."""
    versions = dict(COMBINATIONS[name])
    version = versions.pop("python")
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([f"python{version}", "-m", "venv", str(folder / name)], check=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *INDEX, f"torch=={versions['torch']}.*"], check=True)
    requirements = [f"{library}=={minor}.*" for library, minor in versions.items()]
    subprocess.run([*install, *requirements, "-e", f"{ROOT}[test]"], check=True)
    return python


def run_combination(name: str, folder: Path, minutes: float, workers: int) -> dict[str, object]:
    """Runs the remaining tests of a combination; returns its table row."""
    python = prepare_environment(name, folder)
    log = folder / f"{name}.jsonl"
    until = time.time() + 60 * minutes
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    # `--option=value` in one word: pytest would take an existing file in a word after the option as a test path, which
    # determines its configuration.
    command = [str(python), "-m", "pytest", "-p", "tests.matrix", f"--outcomes={log}", f"--until={until}"]
    command += ["-n", str(workers)]
    with (folder / f"{name}.log").open("w", encoding="utf-8") as out:
        subprocess.run(command, cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT, check=False)
    versions = subprocess.run(
        [str(python), "-m", "hf_megatron.cli", "env", "--json"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    environment = json.loads(versions.stdout)
    test_ids = json.loads(log.with_suffix(".tests").read_text(encoding="utf-8"))
    # Drops tests that were renamed or removed since an interrupted run.
    results = {test: outcome for test, outcome in outcomes(log).items() if test in set(test_ids)}
    counts = {outcome: sum(value == outcome for value in results.values()) for outcome in ("passed", "skipped")}
    return {
        "versions": {"python": environment["python"]}
        | {name: library["installed"] for name, library in environment["libraries"].items() if library["installed"]},
        "first tier": len(test_ids),
        **counts,
        "failed": sorted(test for test, outcome in results.items() if outcome == "failed"),
    }


def load_rows() -> dict[str, dict]:
    """Returns the recorded table row of each combination."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def render_table() -> str:
    """Renders the combinations and their counts as Markdown, then the failed tests."""
    rows = load_rows()
    names = ("python", *NEWEST)
    lines = ["| combination | versions | passed | failed |", "|---|---|---|---|"]
    for name in COMBINATIONS:
        if (row := rows.get(name)) is None:
            continue
        ran = row["passed"] + row["skipped"] + len(row["failed"])
        extent = "" if ran == row["first tier"] else f", {ran} of {row['first tier']} run"
        # Older rows lack the libraries that were added later.
        versions = [f"{library} {row['versions'][library]}" for library in names if library in row["versions"]]
        passed = f"{row['passed']} ({row['skipped']} skipped{extent})"
        lines.append(f"| {name} | {', '.join(versions)} | {passed} | {len(row['failed'])} |")
    missing = [f"`{name}`" for name in COMBINATIONS if name not in rows]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    failed = [f"- {name}: `{test}`" for name, row in rows.items() for test in row["failed"]]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where environments and outcomes are kept")
    parser.add_argument("combinations", nargs="*", help=f"of {', '.join(COMBINATIONS)}; all by default")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="how long each may run")
    parser.add_argument("--workers", type=int, default=2, help="how many tests run at once")
    arguments = parser.parse_args()
    if unknown := set(arguments.combinations) - set(COMBINATIONS):
        parser.error(f"no combination: {', '.join(sorted(unknown))}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.combinations or COMBINATIONS:
        row = run_combination(name, folder, arguments.minutes, arguments.workers)
        rows = load_rows() | {name: row}
        ordered = {key: rows[key] for key in COMBINATIONS if key in rows}
        DATA.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")
        print(name, row["passed"], "passed", len(row["failed"]), "failed", "of", row["first tier"], flush=True)


if __name__ == "__main__":
    main()

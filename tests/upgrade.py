"""Upgrade of upstream libraries: what changed in the code that this library replaces, and which tests fail.

    python -m tests.upgrade transformers==5.25.0 --folder FOLDER      # compares, then runs the first tier
    python -m tests.upgrade torch==2.16.0 trl==1.17.0 --folder FOLDER --no-tests
    python -m tests.upgrade --record                                  # after the changes were looked at

The command makes an environment with the named versions in the folder, and the versions of the current environment for
everything else. It compares each replaced function and each upstream symbol of `compat/` with `tests/upstream.json`,
which `--record` writes from the current environment, and prints what changed, moved and is gone, by the patch or file
that depends on it, and the model types whose code changed. `changes.diff` in the folder has the differences of the
sources, if the current environment has the recorded versions. Failed tests are grouped by the innermost patch in their
traceback.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tests.helpers.upstream import LIBRARIES, Fingerprint, Snapshot, take_snapshot
from tests.structure import ROOT

RECORD = ROOT / "tests" / "upstream.json"
# What a record and an environment may differ in without a change of source.
_LOCAL_VERSION = re.compile(r"\+.*")
# A replaced function's frame is named `function[feature]`, see `compat/patch_registry.py`.
_PATCH_FRAME = re.compile(r'File ".*", line \d+, in (\w+\[[\w.]+\])')
_OWN_FRAME = re.compile(r'File ".*?((?:hf_megatron|conversion|model_cards)/[\w/]+\.py)", line \d+, in (\S+)')
_ERROR = re.compile(r"^(?:E\s+)?([A-Za-z_][\w.]*(?:Error|Exception|Warning)\b.*)", re.MULTILINE)


class Change(NamedTuple):
    """A difference between two snapshots.

    Attributes:
        kind: `changed`, `gone`, `moved` or `new`.
        section: `patches`, `copies` or `symbols`, as in `Snapshot`.
        details: number of changed lines, or the new place.
    """

    kind: str
    section: str
    name: str
    used_by: Sequence[str]
    details: str = ""


def compare_snapshots(before: Snapshot, after: Snapshot) -> list[Change]:
    """Returns the differences between two environments, of names that both versions of this library's code have."""
    changes = []
    for section, old in before.tables().items():
        new = after.tables()[section]
        for name, one in old.items():
            other = new.get(name, Fingerprint())
            used_by = other.used_by or one.used_by
            if other.kind == "missing" and one.kind != "missing":
                changes.append(Change("gone", section, name, used_by))
            elif one.kind == "missing" and other.kind != "missing":
                changes.append(Change("new", section, name, used_by))
            elif (one.digest, one.kind) != (other.digest, other.kind):
                changes.append(Change("changed", section, name, used_by, _count_lines(one, other)))
            elif one.defined_in != other.defined_in:
                changes.append(Change("moved", section, name, used_by, f"{one.defined_in} -> {other.defined_in}"))
        if section == "copies":
            changes += [Change("new", section, name, one.used_by) for name, one in new.items() if name not in old]
    gone = set(after.missing_attributes) - set(before.missing_attributes)
    changes += [Change("gone", "attributes", name, after.attributes[name]) for name in sorted(gone)]
    return changes


def _diff(one: Fingerprint, other: Fingerprint) -> list[str]:
    old, new = (fingerprint.source.splitlines() for fingerprint in (one, other))
    return list(difflib.unified_diff(old, new, lineterm="", n=3))[2:]


def _count_lines(one: Fingerprint, other: Fingerprint) -> str:
    if one.kind != other.kind:
        return f"{one.kind} -> {other.kind}"
    if not (one.source and other.source):
        return ""
    lines = _diff(one, other)
    return " ".join(f"{sign}{sum(line.startswith(sign) for line in lines)}" for sign in "+-")


def render_diff(before: Snapshot, after: Snapshot, changes: Iterable[Change]) -> str:
    """Renders the changed sources as a unified diff without comments, docstrings and indentation."""
    parts = []
    for change in changes:
        if change.kind == "changed":
            one, other = (snapshot.tables()[change.section][change.name] for snapshot in (before, after))
            users = ", ".join(change.used_by)
            parts += [f"=== {change.name} ({users})", *_diff(one, other), ""]
    return "\n".join(parts) + "\n"


def render_report(before: Snapshot, after: Snapshot, changes: Sequence[Change], moved: Mapping[str, str]) -> str:
    """Renders versions, counts, and one line per change, for a person to read."""
    lines = []
    for name in LIBRARIES:
        old, new = before.versions.get(name, "none"), after.versions.get(name, "none")
        if _public(old) != _public(new):
            lines.append(f"{name} {_public(old)} -> {_public(new)}")
    total = sum(len(table) for table in before.tables().values())
    kinds = ("gone", "changed", "moved", "new")
    counts = ", ".join(f"{sum(change.kind == kind for change in changes)} {kind}" for kind in kinds)
    unchanged = total - sum(change.kind != "new" and change.section != "attributes" for change in changes)
    lines.append(f"{total} upstream functions and symbols: {unchanged} unchanged, {counts}")
    for kind in kinds:
        chosen = [change for change in changes if change.kind == kind]
        lines += ["", f"{kind}:"] * bool(chosen)
        for change in chosen:
            details = f" [{change.details}]" if change.details else ""
            if change.name in moved:
                details = f" [same name in {moved[change.name]}]"
            lines.append(f"  {change.name}{details}  <- {', '.join(change.used_by)}")
    types = sorted(set(after.model_types) - set(before.model_types))
    lines += ["", f"new model types: {', '.join(types)}"] * bool(types)
    removed = sorted(set(before.model_types) - set(after.model_types))
    lines += ["", f"model types that are gone: {', '.join(removed)}"] * bool(removed)
    if types_to_compare := list_changed_types(before, after):
        total = len(set(before.model_types) & set(after.model_types))
        lines += ["", f"code of {len(types_to_compare)} of {total} model types changed: compare them with"]
        lines.append(f"  hf-megatron check {' '.join(types_to_compare)} --layout tp2,tp2+sp,pp2")
    return "\n".join(lines) + "\n"


def list_changed_types(before: Snapshot, after: Snapshot) -> list[str]:
    """Returns the model types of both snapshots whose modeling files differ."""
    common = set(before.model_types) & set(after.model_types)
    return sorted(name for name in common if before.model_types[name] != after.model_types[name])


def _public(version: str) -> str:
    return _LOCAL_VERSION.sub("", version)


# Environment


def list_requirements(pins: Mapping[str, str]) -> list[str]:
    """Returns the requirements of the library and its tests, with pinned versions instead of their ranges."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project["optional-dependencies"]
    requirements: dict[str, str] = {}
    waiting = [*project["dependencies"], *groups["test"]]
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name == canonicalize_name(project["name"]):
            waiting += [line for extra in requirement.extras for line in groups[extra]]
        else:
            requirements[name] = f"{name}=={pins[name]}" if name in pins else str(requirement)
    unknown = sorted(set(pins) - set(requirements))
    return [*requirements.values(), *(f"{name}=={pins[name]}" for name in unknown)]


def list_releases(library: str) -> list[str] | None:
    """Returns a library's releases, newest first, as pip sees them; `None` if pip cannot list them."""
    command = [sys.executable, "-m", "pip", "index", "versions", library, "--pre"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    listed = re.search(r"^Available versions: (.+)$", result.stdout, re.MULTILINE)
    return None if listed is None else listed[1].split(", ")


def prepare_environment(folder: Path, pins: Mapping[str, str]) -> Path:
    """Returns the interpreter of an environment with the pinned versions; makes it unless it exists.

    Everything else gets the version of the current environment, so that nothing else can change a result.
    """
    name = "+".join(f"{library}-{version}" for library, version in sorted(pins.items()))
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions()}
    kept = {name: _public(installed[name]) for name in _LIBRARY_NAMES if name in installed}
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # torch first: the wheel of this environment's build, which the others then find installed.
    versions = kept | dict(pins)
    subprocess.run([*install, f"torch=={versions['torch']}"], check=True)
    subprocess.run([*install, *list_requirements(versions)], check=True)
    # Without its dependencies, whose ranges may end before the pinned versions.
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    return python


_LIBRARY_NAMES = tuple(canonicalize_name(name) for name in LIBRARIES)


# Tests


def run_first_tier(python: Path, report: Path, workers: int) -> None:
    """Runs the first tier in an environment, into a JUnit file."""
    command = [str(python), "-m", "pytest", "-q", "-n", str(workers), "--tb=native", f"--junitxml={report}"]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join((str(python.parent), variables["PATH"]))
    subprocess.run(command, cwd=ROOT, env=variables | {"PATH": path}, check=False)


def find_culprit(traceback: str) -> str:
    """Returns the innermost patch in a traceback, else the innermost function of this library, else `no patch`."""
    if frames := _PATCH_FRAME.findall(traceback):
        return frames[-1]
    if frames := _OWN_FRAME.findall(traceback):
        file, function = frames[-1]
        return f"{file}: {function}"
    return "no patch"


def group_failures(report: Path) -> tuple[int, dict[str, list[str]]]:
    """Returns the number of tests in a JUnit file, and the failed ones with their errors by patch."""
    groups: dict[str, list[str]] = {}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    for case in cases:
        for failure in (*case.iter("failure"), *case.iter("error")):
            text = failure.text or failure.get("message", "")
            errors = _ERROR.findall(text)
            error = errors[-1] if errors else failure.get("message", "").partition("\n")[0]
            test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            groups.setdefault(find_culprit(text), []).append(f"{test}: {error[:160]}")
    return len(cases), dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def render_failures(count: int, groups: Mapping[str, Sequence[str]]) -> str:
    """Renders the failed tests by patch, most first."""
    failed = sum(map(len, groups.values()))
    lines = [f"first tier: {count} tests, {failed} failed"]
    for culprit, tests in groups.items():
        lines += [f"  {culprit}: {len(tests)}", *(f"    {test}" for test in tests)]
    return "\n".join(lines) + "\n"


# Command line


def _parse_pins(texts: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, str]:
    pins = {}
    for text in texts:
        name, _, version = text.partition("==")
        try:
            Version(version)
        except InvalidVersion:
            parser.error(f"{text!r}: expected LIBRARY==VERSION")
        if (canonical := canonicalize_name(name)) not in (*_LIBRARY_NAMES, "huggingface-hub", "tokenizers", "datasets"):
            parser.error(f"{name}: expected one of {', '.join(_LIBRARY_NAMES)}, huggingface-hub, tokenizers, datasets")
        pins[canonical] = version
    return pins


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY==VERSION", help="versions to upgrade to")
    parser.add_argument("--folder", type=Path, help="where the environment and the results are kept")
    parser.add_argument("--no-tests", action="store_true", help="compare the sources only")
    parser.add_argument("--workers", type=int, default=2, help="how many tests run at once")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} from the current environment")
    options = parser.parse_args(arguments)
    if options.record:
        if options.libraries:
            parser.error("--record takes no versions: it records the current environment")
        take_snapshot().write(RECORD, with_sources=False)
        return 0
    if not options.libraries or options.folder is None:
        parser.error("expected LIBRARY==VERSION and --folder, or --record")
    pins = _parse_pins(options.libraries, parser)
    for name, version in pins.items():
        releases = list_releases(name)
        if releases is not None and not any(
            SpecifierSet(f"=={version}").contains(release, prereleases=True) for release in releases
        ):
            parser.error(f"{name}=={version}: no such release; the newest are {', '.join(releases[:5])}")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    recorded, before = Snapshot.read(RECORD), take_snapshot()
    if {name: _public(version) for name, version in before.versions.items()} != {
        name: _public(version) for name, version in recorded.versions.items()
    }:
        print(f"This environment does not have the versions of {RECORD.name}: the differences have no diff.")
        before = recorded
    python = prepare_environment(folder, pins)
    file = folder / "after.json"
    subprocess.run([str(python), "-m", "tests.helpers.upstream", str(file)], cwd=ROOT, check=True)
    after = Snapshot.read(file)
    changes = compare_snapshots(before, after)
    gone = [change.name for change in changes if change.kind == "gone" and change.section != "attributes"]
    moved = json.loads(
        subprocess.run(
            [str(python), "-c", _FIND_MOVED, json.dumps(gone)], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )
    (folder / "changes.diff").write_text(render_diff(before, after, changes), encoding="utf-8")
    report = render_report(before, after, changes, moved)
    (folder / "report.txt").write_text(report, encoding="utf-8")
    print(report, flush=True)
    if options.no_tests:
        return 0
    results = folder / "first_tier.xml"
    run_first_tier(python, results, options.workers)
    count, groups = group_failures(results)
    failures = render_failures(count, groups)
    (folder / "report.txt").write_text(report + "\n" + failures, encoding="utf-8")
    print(failures)
    return 1 if groups else 0


_FIND_MOVED = (
    "import json, sys; from tests.helpers.upstream import find_moved; "
    "print(json.dumps({name: place for name in json.loads(sys.argv[1]) if (place := find_moved(name))}))"
)

if __name__ == "__main__":
    sys.exit(main())

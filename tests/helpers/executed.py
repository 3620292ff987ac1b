"""Recorder of the source files that each test file executes, including forked ranks.

    python -m pytest -n auto --executed=tests/executed.json    # records a run
    python -m tests.where hf_megatron/core/mesh.py             # prints its test files

A global trace function records the file of every called function and disables tracing inside it, so a run takes two
to three times as long. Newly started processes, such as launchers, are not traced.
"""

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "executed.json"
_SOURCES = ("hf_megatron", "conversion", "model_cards")
_FOLDER = "EXECUTED_FOLDER"
_prefixes = tuple(f"{ROOT}{os.sep}{name}{os.sep}" for name in _SOURCES)
_called: set[str] = set()
_exit = os._exit


def _record_call(frame: FrameType, event: str, argument: object) -> None:
    _called.add(frame.f_code.co_filename)


def _list_called_sources() -> list[str]:
    return [name for name in _called if name.startswith(_prefixes)]


def _record_and_exit(status: int) -> None:
    """Replaces `os._exit`: writes the called files first, since a forked rank never returns to the test."""
    with tempfile.NamedTemporaryFile("w", dir=os.environ[_FOLDER], suffix=".json", delete=False) as file:
        json.dump(_list_called_sources(), file)
    _exit(status)


def pytest_addoption(parser):
    parser.addoption("--executed", metavar="FILE", help="write which source files each test file executes")


def pytest_configure(config):
    if config.getoption("--executed"):
        config.pluginmanager.register(_Recorder(config), "executed")


class _Recorder:
    """Plugin that traces this process and its forks, and collects the called source files per test file."""

    def __init__(self, config):
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self.tests_by_source: dict[str, set[str]] = defaultdict(set)
        if not self.is_worker:
            # Workers inherit this variable and write their results to the same folder.
            os.environ[_FOLDER] = tempfile.mkdtemp(prefix="executed_")
        self.folder = Path(os.environ[_FOLDER])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        # A separate folder per test: ranks of different workers may end at the same time.
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        os.environ[_FOLDER] = str(folder)
        _called.clear()
        os._exit = _record_and_exit
        sys.settrace(_record_call)
        threading.settrace(_record_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            os._exit = _exit
            os.environ[_FOLDER] = str(self.folder)
            files = [name for file in folder.glob("*.json") for name in json.loads(file.read_text(encoding="utf-8"))]
            for name in {*_list_called_sources(), *files}:
                self.tests_by_source[Path(name).relative_to(ROOT).as_posix()].add(item.nodeid.partition("::")[0])

    def pytest_sessionfinish(self):
        content = {name: sorted(tests) for name, tests in self.tests_by_source.items()}
        if self.is_worker or self.config.getoption("numprocesses", None) is None:
            (self.folder / f"of_{os.getpid()}.json").write_text(json.dumps(content), encoding="utf-8")
        if self.is_worker:
            return
        merged: dict[str, set[str]] = defaultdict(set)
        for file in self.folder.glob("of_*.json"):
            for name, tests in json.loads(file.read_text(encoding="utf-8")).items():
                merged[name].update(tests)
        lines = (f"{json.dumps(name)}: {json.dumps(sorted(merged[name]))}" for name in sorted(merged))
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        Path(self.config.getoption("--executed")).write_text(text, encoding="utf-8")

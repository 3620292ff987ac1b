"""Shared fixtures, and the rule that every skip is on the committed list."""

import os
from pathlib import Path

import pytest

# Before torch and transformers are imported: one thread as on the ranks, and no hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402
import transformers  # noqa: E402

import hf_megatron  # noqa: E402, F401

TESTS = Path(__file__).parent
ALLOWED_SKIPS = TESTS / "allowed_skips.txt"

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

_skipped: dict[str, str] = {}


@pytest.fixture(scope="session")
def stories() -> Path:
    """A trained 260,032-parameter Llama: hidden 64, 5 layers, 8 heads, 4 KV heads, vocabulary 512, tied."""
    return TESTS / "data" / "stories260K_hf"


@pytest.fixture(scope="session")
def story_texts() -> list[str]:
    """Five short stories."""
    text = (TESTS / "data" / "tinystories_sample.txt").read_text(encoding="utf-8")
    return [story.strip() for story in text.split("<|endoftext|>") if story.strip()]


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.nodeid] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("skips")
    for name, reason in sorted(_skipped.items()):
        terminalreporter.write_line(f"{name}: {reason}")
    terminalreporter.write_line(f"{len(_skipped)} skipped, all of them on the allow-list" if not _surplus() else "")
    for name in _surplus():
        terminalreporter.write_line(f"NOT ON THE ALLOW-LIST: {name}")


def _surplus() -> list[str]:
    allowed = [line.split("#")[0].strip() for line in ALLOWED_SKIPS.read_text().splitlines()]
    allowed = [name for name in allowed if name]
    return [name for name in sorted(_skipped) if not any(name.startswith(prefix) for prefix in allowed)]


def pytest_sessionfinish(session, exitstatus):
    if _surplus() and exitstatus == 0:
        session.exitstatus = 1

"""Shared fixtures, test tiers, and the check that every skip is on the allow-list."""

import os
import shutil
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

# Set before torch and transformers are imported: one thread, as on the ranks, and no access to the Hub.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

pytest_plugins = ["tests.helpers.costs", "tests.helpers.progress", "tests.helpers.executed"]

import torch  # noqa: E402
import transformers  # noqa: E402

import hf_megatron  # noqa: E402, F401

TESTS = Path(__file__).parent
ALLOWED_SKIPS = TESTS / "allowed_skips.txt"
FIRST_TIER = TESTS / "first_tier.txt"
# The marker expression in `addopts` of pyproject.toml.
ONLY_FIRST = "not slow"
# Environment variable with the folder of `tests.helpers.shared_tiny_models`.
TINY_MODELS = "SHARED_TINY_MODELS"

# transformers 5.24 asks for PEFT 0.22, which is not released; it works with 0.21.
transformers.integrations.peft.MIN_PEFT_VERSION = "0.20.0"
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

_skipped: dict[str, str] = {}


def pytest_configure(config):
    for package in ("hf_megatron", "hf_megatron.conversion", "hf_megatron.model_cards"):
        origin = find_spec(package).origin
        if TESTS.parent not in Path(origin).parents:
            raise pytest.UsageError(f"{package} is {origin}, not this checkout's: run `pip install -e .` here")
    # Tests named on the command line run regardless of their tier.
    if config.args_source is config.ArgsSource.ARGS and config.option.markexpr == ONLY_FIRST:
        config.option.markexpr = ""
    if not _is_worker(config):
        os.environ[TINY_MODELS] = tempfile.mkdtemp(prefix="hf_megatron_twins_")


def pytest_unconfigure(config):
    # After a usage error in `pytest_configure`, the variable is not set.
    if not _is_worker(config) and TINY_MODELS in os.environ:
        shutil.rmtree(os.environ.pop(TINY_MODELS), ignore_errors=True)


def pytest_xdist_auto_num_workers():
    """Returns the worker count of `-n auto`: one per core, at most 8 to limit memory."""
    return min(len(os.sched_getaffinity(0)), 8)


def _is_worker(config):
    return hasattr(config, "workerinput")


def _read_list(file: Path) -> list[str]:
    lines = [line.partition("  #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _parse_slow_part(text: str) -> tuple[int, int]:
    try:
        part, parts = (int(number) for number in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--slow-part={text} is not K/N with 1 <= K <= N")
    return part, parts


def pytest_addoption(parser):
    parser.addoption(
        "--slow-part", metavar="K/N", help="of the slow tests, the K-th of N parts that take about as long"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks tests that `first_tier.txt` does not list as slow, before `-m` selects.

    Deselects GPU tests if there is no GPU, and slow tests of other parts than `--slow-part`.
    """
    listed = {line.removeprefix("!").strip(): not line.startswith("!") for line in _read_list(FIRST_TIER)}
    names = set()
    for item in items:
        fitting = [name for name in listed if item.nodeid.startswith(name)]
        names.update(fitting)
        if not fitting or not listed[max(fitting, key=len)]:
            item.add_marker(pytest.mark.slow)
    if config.args_source is config.ArgsSource.TESTPATHS and listed.keys() - names:
        raise pytest.UsageError(f"{FIRST_TIER.name} lists what is no test: {sorted(listed.keys() - names)}")
    left_out = set()
    if not torch.cuda.device_count():
        left_out |= {item for item in items if item.get_closest_marker("gpu")}
    if text := config.getoption("slow_part"):
        # Imported late, so that pytest can rewrite the assertions of this plugin.
        from tests.helpers.costs import split_by_cost

        part, parts = _parse_slow_part(text)
        others = [item for item in items if item.get_closest_marker("slow") and item not in left_out]
        # Functions are not split, since their cases share runs.
        chosen = split_by_cost(Counter(map(_function_id, others)), parts)[part - 1]
        left_out |= {item for item in others if _function_id(item) not in chosen}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _function_id(item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture(scope="session")
def stories() -> Path:
    """Folder of a trained 260,032-parameter Llama: hidden 64, 5 layers, 8 heads, 4 KV heads, vocabulary 512, tied."""
    return TESTS / "data" / "stories260K_hf"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Folder of a random Llama of two layers: hidden 32, 4 heads, 2 KV heads, vocabulary 64, tied."""
    from tests.helpers.training import save_tiny

    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_uneven(tmp_path_factory) -> Path:
    """Folder of an untied `tiny` with vocabulary 67, which gives vocabulary shards of unequal size."""
    from tests.helpers.training import save_tiny

    folder = tmp_path_factory.mktemp("tiny_uneven")
    save_tiny(folder, vocab_size=67, tie_word_embeddings=False)
    return folder


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
    terminalreporter.write_line(
        f"{len(_skipped)} skipped, all of them on the allow-list" if not _find_unlisted_skips() else ""
    )
    for name in _find_unlisted_skips():
        terminalreporter.write_line(f"NOT ON THE ALLOW-LIST: {name}")


def _find_unlisted_skips() -> list[str]:
    allowed = tuple(_read_list(ALLOWED_SKIPS))
    return [name for name in sorted(_skipped) if not name.startswith(allowed)]


def pytest_sessionfinish(session, exitstatus):
    # With xdist, the controller process has the reports of all workers.
    if not _is_worker(session.config) and _find_unlisted_skips() and exitstatus == 0:
        session.exitstatus = 1

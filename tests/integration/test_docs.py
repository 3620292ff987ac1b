"""Every Python block of README and docs runs, on two ranks, file by file."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from hf_megatron.core.fork_harness import run_ranks
from tests.generated_docs import PARTS, render_page, shorten_targets
from tests.support_table import render_support_summary, render_support_table, update_page

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DESIGN = ROOT / "docs" / "design"
LONGEST_DESIGN_PAGE = 200


def extract_python_blocks(file):
    return re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("file", [file for file in FILES if extract_python_blocks(file)], ids=lambda file: file.name)
def test_python_blocks_run(file, stories, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def execute():
        names = {"path": str(stories), "input_ids": torch.arange(3, 19).view(2, 8)}
        for block in extract_python_blocks(file):
            exec(compile(block, file.name, "exec"), names)

    run_ranks(execute, 2)


def test_support_table_and_summary_are_up_to_date(tmp_path):
    for page in (ROOT / "README.md", ROOT / "docs" / "supported_models.md"):
        copy = Path(shutil.copy(page, tmp_path))
        update_page(copy)
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
        assert any(text in copy.read_text("utf-8") for text in (render_support_table(), render_support_summary()))


@pytest.mark.parametrize("page", PARTS)
def test_generated_parts_are_up_to_date(page):
    assert render_page(page) == (ROOT / page).read_text(encoding="utf-8"), "run `python -m tests.generated_docs`"


def test_shared_targets_are_shortened():
    assert shorten_targets(["a.b:C.f"]) == "`a.b:C.f`"
    assert shorten_targets(["a.b:C.f", "a.d:E.f"]) == "`a.*.f` for `b:C`, `d:E`"
    assert shorten_targets(["a.bc:f", "a.bd:f"]) == "`a.*:f` for `bc`, `bd`"
    assert shorten_targets(["a:f", "a.b:f"]) == "`*:f` for `a`, `a.b`"


def test_design_pages_are_short_and_indexed():
    index = (DESIGN / "README.md").read_text(encoding="utf-8")
    for page in DESIGN.glob("*.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST_DESIGN_PAGE, page.name
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def make_heading_slugs(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_resolve():
    for file in (*FILES, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", ROOT / "benchmarks" / "README.md"):
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", file.read_text(encoding="utf-8")):
            page = file.parent / target if target else file
            assert target.startswith("http") or page.exists(), f"{file.name}: {target}"
            if anchor and page.suffix == ".md":
                assert anchor in make_heading_slugs(page), f"{file.name}: {target}#{anchor}"


def test_no_file_has_local_paths_or_index_hosts():
    pattern = re.compile(r"(^|[\s\"'(=])/(work|root|home|farm)/|index-url https?://(?!download\.pytorch\.org)")
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        text = file.suffix in (".py", ".md", ".toml", ".yaml", ".txt", ".json") and file != Path(__file__)
        if text and not parts[0].startswith((".", "outputs")):
            assert not pattern.search(file.read_text(encoding="utf-8", errors="replace")), file

"""Tests of the documentation's form: cited files and names exist, code is fenced, tables are narrow."""

import importlib
import re
import runpy
import shutil

import pytest

from tests.structure import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("", "docs", "docs/design", "examples", "benchmarks", "tests/data")
    for path in (ROOT / folder).glob("*.md")
    # The changelog keeps the names of past versions.
    if path.name != "CHANGELOG.md"
)
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("hf_megatron", "conversion", "model_cards", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
# Files of Megatron-LM, transformers and Megatron-Bridge are cited with their upstream folders.
_CITED = re.compile(r"megatron/|tools/|examples/multimodal|transformers/|torch/|_provider|src/|checkpointing\.py")


def _exists(name: str) -> bool:
    return any(file == name or file.endswith(f"/{name}") for file in FILES)


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_cited_files_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    # A file name without a folder may belong to another project.
    file_names = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text))
    assert not {name for name in file_names if not _exists(name) and not _CITED.search(name)}


@pytest.mark.parametrize("page", PAGES)
def test_dotted_library_names_resolve(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    dotted_names = set(re.findall(r"`(hf_megatron(?:\.[A-Za-z_][A-Za-z_0-9]*)+)", text))
    assert not {name for name in dotted_names if not _resolves(name)}


# Languages of code blocks; Python and Bash blocks run in tests unless they are marked.
FENCES = {"python", "python no-run", "bash", "bash no-run", "diff", "json", "text", "yaml"}
# One column per layout.
WIDE_TABLES = {"docs/data_parallel.md", "docs/supported_models.md"}
MAX_COLUMNS = 4


@pytest.mark.parametrize("page", PAGES)
def test_code_is_fenced_with_its_language(page):
    """Indented code and other fences would escape the tests that run code blocks."""
    fenced = False
    previous = ""
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if fence := re.match(r"\s*```(.*)", line):
            assert fenced or fence[1] in FENCES, f"{page}:{number}"
            fenced = not fenced
        # Deeper lines of a list are no code.
        is_code = re.match(r"    (?! *([-*]|\d+\.) )\S", line) and not previous.strip()
        assert fenced or not is_code, f"{page}:{number}: indented code"
        previous = line
    assert not fenced


@pytest.mark.parametrize("page", sorted(set(PAGES) - WIDE_TABLES))
def test_tables_are_narrow(page):
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if re.fullmatch(r"\|[\s:|-]+\|", line):
            assert line.count("|") - 1 <= MAX_COLUMNS, f"{page}:{number}"


@pytest.mark.parametrize("script", sorted((ROOT / "docs" / "pictures").glob("*.py")), ids=lambda script: script.stem)
def test_pictures_are_up_to_date(script, tmp_path):
    """Numbers in pictures are those in benchmarks/results."""
    folder = tmp_path / "docs" / "pictures"
    folder.mkdir(parents=True)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    runpy.run_path(str(shutil.copy(script, folder)), run_name="__main__")
    assert (folder / f"{script.stem}.svg").read_text("utf-8") == script.with_suffix(".svg").read_text("utf-8")

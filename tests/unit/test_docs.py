"""Names in the documentation exist: files in backticks, and dotted names of the library."""

import importlib
import re

import pytest

from tests.structure import ROOT

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("", "docs", "docs/design", "examples", "benchmarks", "tests/data")
    for path in (ROOT / folder).glob("*.md")
    # What a version had is named as it was.
    if path.name != "CHANGELOG.md"
)
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("hf_megatron", "conversion", "model_cards", "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
# Files of Megatron-LM, transformers and Megatron-Bridge are cited with their folders there.
_CITED = re.compile(r"megatron/|tools/|examples/multimodal|transformers/|torch/|_provider|src/|checkpointing\.py")


def _exists(name: str) -> bool:
    return any(file == name or file.endswith(f"/{name}") for file in FILES)


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[end:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    # A name without a folder may be a script of another project.
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", text))
    assert not {name for name in named if not _exists(name) and not _CITED.search(name)}


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_of_the_library_resolve(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`(hf_megatron(?:\.[A-Za-z_][A-Za-z_0-9]*)+)", text))
    assert not {name for name in named if not _resolves(name)}

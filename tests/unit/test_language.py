"""Tests of the language in code, messages, help texts and docs: rates of four patterns, and replaceable phrases."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("hf_megatron", "conversion", "model_cards")
# Pages with quotes of recorded runs or lists of upstream functions.
QUOTING = {"patches.md", "supported_models.md", "surface.md", "which_layout.md"}

FRONTED = re.compile(
    r"^#+\s*(Of|What|Where|Whose|Who|Whoever|Nobody|Somebody|Nor|None of|Those|That of|Behind|Beside|Neither)\b"
)
RELATIVE = re.compile(r"^(What|Which|Where|How|Whether|Who|Whose)\b")
OF_NAME = re.compile(r"^_?([a-z0-9]+_)*of(_[a-z0-9]+)*$")
MARKERS = re.compile(
    r"\b(whoever|nobody|somebody|of which|that of|those of|beside|behind|alike|under way|at hand|by itself|"
    r"in the place of|laid out|lays out)\b",
    re.IGNORECASE,
)
# Phrase -> replacement.
PHRASES = {
    r"la(y|ys|id) out": "parallelized, sharded",
    r"one process's": "the single-process run's",
    r"equal to one process": "matches the single-process run",
    r"nobody|somebody|whoever": "no rank; the component's name",
    r"th(at|ose) of": "the noun again",
    r"beside": "with, next to, in addition to",
    r"behind": "after",
    r"alike": "the same on every rank",
    r"under way": "in flight, active",
    r"at hand": "available, local",
    r"in the place of": "instead of",
    r"goes on|went on|gone on": "continues, resumes",
    r"told apart": "distinguished",
    r"shared out|dealt out": "distributed",
    r"put together": "gathered",
    r"hand(ed|s)? out": "returned",
    r"twins?": "tiny test model",
    r"towers": "vision encoder, audio encoder",
    r"verdicts?": "flag, decision",
    r"of one's own": "custom",
    r"habits?": "training-loop pattern",
    r"comput(e|es|ed|ing) again": "recomputed",
    r"add(s|ed)? up": "sums, accumulates, all-reduces",
    r"stands? for": "replaces, is a proxy for",
    r"rehears\w*": "trial forward",
    r"in few bits": "quantized",
    r"quantis\w*|synchronis\w*|initialis\w*|serialis\w*|normalis\w*": "American spelling",
    r"neighbours?|colours?|behaviours?": "American spelling",
}
PHRASE = re.compile("|".join(rf"\b({phrase})\b" for phrase in PHRASES))


def list_sources() -> list[Path]:
    """Returns the Python files of the library."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_docstrings(tree: ast.Module) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, nodes) and (text := ast.get_docstring(node))]


def list_comments(path: Path) -> list[tuple[int, str]]:
    """Returns line and text of each comment token."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def test_comments_begin_with_their_subject():
    fronted, count = [], 0
    for path in list_sources():
        previous = -2
        for line, text in list_comments(path):
            # Only the first line of a comment counts.
            if line != previous + 1:
                count += 1
                if FRONTED.match(text):
                    fronted.append(f"{path.relative_to(ROOT)}:{line} {text}")
            previous = line
    assert len(fronted) <= 0.01 * count, "\n".join(fronted)


def test_module_docstrings_are_noun_phrases_or_begin_with_a_verb():
    heads = {path: ast.get_docstring(parse_file(path)) for path in list_sources()}
    assert not [str(path) for path, head in heads.items() if head and RELATIVE.match(head)]


def test_few_nonstandard_words():
    words, markers = 0, []
    for path in list_sources():
        text = " ".join([*list_docstrings(parse_file(path)), *(comment for _, comment in list_comments(path))])
        words += len(text.split())
        markers += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MARKERS.finditer(text)]
    assert len(markers) <= 1.5e-3 * words, "\n".join(markers)


def test_functions_are_named_by_verb_and_object():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for path in list_sources() for node in ast.walk(parse_file(path)) if isinstance(node, functions)]
    with_of = [name for name in names if OF_NAME.match(name)]
    assert len(with_of) <= 0.01 * len(names), with_of


def list_messages(path: Path) -> list[tuple[int, str]]:
    """Returns line and constant text of the errors and warnings in a file."""
    texts = []
    for node in ast.walk(parse_file(path)):
        is_warning = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("warn", "warning")
        if isinstance(node, ast.Raise) or is_warning:
            strings = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
            texts.append((node.lineno, "".join(strings)))
    return texts


def find_phrases(text: str) -> list[str]:
    # Code spans quote names and outputs.
    return [match[0] for match in PHRASE.finditer(re.sub(r"`[^`]*`", "``", text))]


def test_messages_use_the_fields_terms():
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in list_sources()
        for line, text in list_messages(path)
        for phrase in find_phrases(text)
    ]
    assert not violations, "\n".join(violations)


PAGES = [
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in QUOTING),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
    ROOT / "benchmarks" / "README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_fields_terms(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [
        f"{line_number}: {phrase}" for line_number, line in enumerate(lines, 1) for phrase in find_phrases(line)
    ]


def test_help_texts_use_the_fields_terms():
    from typer.main import get_command

    from hf_megatron.cli import app

    def walk(command, path):
        for parameter in command.params:
            yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
        yield path, command.help or ""
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}")

    violations = [
        f"{path}: {phrase}" for path, text in walk(get_command(app), "hf-megatron") for phrase in find_phrases(text)
    ]
    assert not violations, "\n".join(violations)


def test_find_phrases():
    assert find_phrases("The model is laid out beside it.") == ["laid out", "beside"] and not find_phrases(
        "It is sharded."
    )

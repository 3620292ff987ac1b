"""Cures in error messages: the sentences of raised errors that tell a user what to do instead.

    python -m tests.helpers.cures            # every cure, by file
    python -m tests.helpers.cures --missing  # cures that `tests/data/cures.json` does not list

`tests/data/cures.json` maps a file to its cures, and each cure to the test that follows it: a test id, or `external: `
and the reason why it cannot be followed in this repository. `tests/unit/test_cures.py` keeps the file complete.
"""

import argparse
import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "data" / "cures.json"
FOLDERS = ("hf_megatron", "conversion", "model_cards")
_VERBS = (
    "Add|Assign|Call|Check|Choose|Convert|Create|Disable|Drop|Edit|Enable|Exclude|Freeze|Give|Increase|Install|Join|Keep|Leave|Load|"
    "Lower|Make|Mark|Merge|Move|Name|Pass|Pull|Put|Raise|Read|Register|Remove|Rename|Replace|Resume|Run|Save|Send|Set|"
    "Split|Start|Train|Use|Wrap|Write"
)
_CURE = re.compile(rf"(?:^|(?<=[.:;?!]\s))(?:{_VERBS})\b[^\n]*?(?=[.;!?](?:\s|$)|$)", re.MULTILINE)


def render_text(node: ast.expr) -> str:
    """Returns the string that an expression builds, with `{}` for every value that is not a constant."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "{}"
    if isinstance(node, ast.JoinedStr):
        return "".join(render_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return render_text(node.left) + render_text(node.right)
    if isinstance(node, ast.IfExp):
        return f"{render_text(node.body)} {render_text(node.orelse)}"
    return "{}"


def find_cures(path: Path) -> list[str]:
    """Returns the cures of a file's `raise` statements and reasons, in the order of the file, each once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Help texts of command line options are no errors.
    helps = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in ("help", "epilog")
        for part in ast.walk(node)
    }
    texts = [
        (node.lineno, render_text(node))
        for node in ast.walk(tree)
        if isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Constant)) and node not in helps
    ]
    documentation = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    cures: dict[str, None] = {}
    for _, text in sorted(texts):
        if text not in documentation:
            cures |= dict.fromkeys(cure.strip() for cure in _CURE.findall(text) if len(cure.split()) > 2)
    # Parts of a longer cure, from the pieces of one expression.
    return [cure for cure in cures if not any(cure != other and cure in other for other in cures)]


def list_cures() -> dict[str, list[str]]:
    """Returns file -> cures, over the library's folders."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): cures for path in files if (cures := find_cures(path))}


def read_record() -> dict[str, dict[str, str]]:
    """Returns file -> cure -> the test that follows it."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true")
    missing, record = parser.parse_args().missing, read_record() if RECORD.exists() else {}
    for file, cures in list_cures().items():
        for cure in cures:
            if not (missing and cure in record.get(file, {})):
                print(f"{file}: {cure}")


if __name__ == "__main__":
    main()

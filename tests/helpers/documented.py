"""Commands shown in README, docs and examples, found by their first words."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
_STARTS = ("hf-megatron ", "accelerate launch", "torchrun ", "python ", "python3 ", "pip ", "ruff ")


def list_documented_commands(start: str) -> list[tuple[str, str]]:
    """Returns (page, command) of each distinct command that begins with `start`, in code blocks and inline code."""
    pages: dict[str, str] = {}
    for page in PAGES:
        for command in _find_commands(page.read_text(encoding="utf-8")):
            if command.startswith(start):
                pages.setdefault(command, page.name)
    return [(page, command) for command, page in pages.items()]


def list_unrecognized_commands() -> list[str]:
    """Returns the lines of shell blocks that begin with none of `_STARTS`."""
    lines = (
        line
        for page in PAGES
        for block in _find_shell_blocks(page.read_text("utf-8"))
        for line in _split_commands(block)
    )
    return [line for line in lines if not line.startswith(_STARTS)]


def _find_shell_blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


def _split_commands(block: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", block)
    commands = (part.split(" #")[0].strip() for line in joined.splitlines() for part in line.split("&&"))
    return [command for command in commands if command and not command.startswith("#")]


def _find_commands(text: str) -> list[str]:
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    commands = [line.strip() for block in _find_shell_blocks(text) for line in _split_commands(block)] + spans
    return [command for command in commands if command.startswith(_STARTS)]

"""Printer of a README command: `python tests/readme_command.py run`, `... test` or `... "test everything"`."""

import re
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def find_readme_command(name: str) -> str:
    """Returns the shell block after `<!-- command: NAME -->` in README."""
    text = README.read_text(encoding="utf-8")
    match = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", text, re.DOTALL)
    if match is None:
        raise SystemExit(f"README.md has no command {name!r}")
    return re.sub(r"\\\n\s*", "", match[1]).strip()


if __name__ == "__main__":
    print(find_readme_command(sys.argv[1]))

"""The support table of README, generated from `verified.json`."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..registry.recorded import records

# Heading -> kind of layout, tp size, pp size.
COLUMNS = {"tp2": ("tp", 2, 1), "tp2 + sp": ("tp+sp", 2, 1), "tp4": ("tp", 4, 1), "pp2": ("pp", 1, 2)}
_BEGIN, _END = "<!-- support table -->\n", "<!-- end of support table -->"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    if not row["passed"]:
        return "no"
    found = re.search(r": ([\d.e+-]+) x the limit", row.get("worst", ""))
    return f"yes ({float(found[1]):.2f})" if found else "yes"


def support_table(rows: Iterable[Mapping[str, Any]] | None = None) -> str:
    """A Markdown table: one line per model class, one column per layout, then the reasons of what is refused."""
    by_class: dict[tuple[str, str], dict[tuple[str, int, int], Mapping[str, Any]]] = defaultdict(dict)
    for row in records() if rows is None else rows:
        by_class[row["model_type"], row["class"]][row["layout"], row["tp_size"], row.get("pp_size", 1)] = row
    lines = [f"| model type | class | {' | '.join(COLUMNS)} |", "|---|---" + "|---" * len(COLUMNS) + "|"]
    reasons = []
    for (model_type, name), results in sorted(by_class.items()):
        cells = [_cell(results.get(column)) for column in COLUMNS.values()]
        lines.append(f"| {model_type} | {name} | {' | '.join(cells)} |")
        for heading, column in COLUMNS.items():
            failed = results.get(column)
            if failed is not None and not failed["passed"]:
                reasons.append(f"- {model_type}, {heading.replace(' ', '')}: {failed['worst']}")
    text = "\n".join(lines) + "\n"
    return text + ("\nRefused, and why:\n\n" + "\n".join(reasons) + "\n" if reasons else "")


def update(path: Path) -> None:
    """Writes the table between the markers of a Markdown file."""
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    path.write_text(before + _BEGIN + support_table() + _END + after, encoding="utf-8")


if __name__ == "__main__":
    update(Path(sys.argv[1]))

"""The support table of the documents and README's summary of it, generated from `verified.json`."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..registry.recorded import records

# Heading -> kind of layout, tp size, pp size.
COLUMNS = {"tp2": ("tp", 2, 1), "tp2 + sp": ("tp+sp", 2, 1), "tp4": ("tp", 4, 1), "pp2": ("pp", 1, 2)}
# What an error says before its reason: the field, and which model it is.
_REASON = re.compile(r"^\w+Error: (MegatronConfig\.\w+( = \S+)?: )?(model type '\w+' )?")
_PART = "<!-- {0} -->\n", "<!-- end of {0} -->"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or not row["passed"]:
        return "-" if row is None else "no"
    found = re.search(r": ([\d.e+-]+) x the limit", row.get("worst", ""))
    return f"yes ({float(found[1]):.2f})" if found else "yes"


def support_table(rows: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Renders one line per model class and one column per layout in Markdown, then the reasons of what is refused."""
    by_class: dict[tuple[str, str], dict[tuple[str, int, int], Mapping[str, Any]]] = defaultdict(dict)
    for row in records() if rows is None else rows:
        by_class[row["model_type"], row["class"]][row["layout"], row["tp_size"], row.get("pp_size", 1)] = row
    lines = [f"| model type | class | {' | '.join(COLUMNS)} |", "|---|---" + "|---" * len(COLUMNS) + "|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for (model_type, name), results in sorted(by_class.items()):
        cells = [_cell(results.get(column)) for column in COLUMNS.values()]
        lines.append(f"| {model_type} | {name} | {' | '.join(cells)} |")
        for heading, column in COLUMNS.items():
            if column in results and not results[column]["passed"]:
                reasons[_REASON.sub("", results[column]["worst"])].append(f"{name} on {heading.replace(' ', '')}")
    refused = "".join(f"- {', '.join(cases)}: {reason}\n" for reason, cases in reasons.items())
    return "\n".join(lines) + "\n" + (f"\nRefused, and why:\n\n{refused}" if refused else "")


def support_summary(rows: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Counts in one sentence how many model classes pass on which layout."""
    found = list(records() if rows is None else rows)
    classes = {(row["model_type"], row["class"]) for row in found}
    passed = Counter((row["layout"], row["tp_size"], row.get("pp_size", 1)) for row in found if row["passed"])
    counts = ", ".join(f"{passed[column]} on {heading.replace(' ', '')}" for heading, column in COLUMNS.items())
    return (
        "Loss, every gradient and the weights after two optimizer steps were compared with one process for "
        f"{len(classes)} model classes: {counts} are equal, [all others raise](docs/supported_models.md).\n"
    )


def update(path: Path) -> None:
    """Writes the table, or the summary, between the markers of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    for name, content in (("support table", support_table()), ("support summary", support_summary())):
        begin, end = (marker.format(name) for marker in _PART)
        before, found, rest = text.partition(begin)
        if found:
            text = before + begin + content + end + rest.partition(end)[2]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        update(Path(argument))

"""Support table of the documentation and its summary in README, generated from `verified.json`."""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_megatron.models.verified import records

# Heading -> layout kind, tp size, pp size, cp size, ep size.
COLUMNS = {
    "tp2": ("tp", 2, 1, 1, 1),
    "tp2 + sp": ("tp+sp", 2, 1, 1, 1),
    "tp4": ("tp", 4, 1, 1, 1),
    "pp2": ("pp", 1, 2, 1, 1),
    "cp2": ("cp", 1, 1, 2, 1),
    "cp2 + a2a": ("cp+a2a", 1, 1, 2, 1),
    "cp4": ("cp", 1, 1, 4, 1),
    "dp2 + ep2": ("ep", 1, 1, 1, 2),
    "tp2 + ep2": ("tp+ep", 2, 1, 1, 2),
    "tp2 + sp + ep2": ("tp+sp+ep", 2, 1, 1, 2),
}
# Prefix of an error message before the reason: the config field and the model type.
_REASON = re.compile(r"^\w+Error: (MegatronConfig\.\w+( = \S+)?: )?(model type '\w+' )?")
_PART = "<!-- {0} -->\n", "<!-- end of {0} -->"


def _layout_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    sizes = (row.get(name, 1) for name in ("pp_size", "cp_size", "ep_size"))
    return row["layout"], row["tp_size"], *sizes


def _render_cell(row: Mapping[str, Any] | None) -> str:
    if row is None or not row["passed"]:
        return "-" if row is None else "no"
    match = re.search(r": ([\d.e+-]+) x the limit", row.get("worst", ""))
    return f"yes ({float(match[1]):.2f})" if match else "yes"


def render_support_table(rows: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Renders a row per model class and a column per layout, then the split shares and the unsupported layouts."""
    by_class: dict[tuple[str, str], dict[tuple[Any, ...], Mapping[str, Any]]] = defaultdict(dict)
    changed_configs: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    reasons: dict[str, list[str]] = defaultdict(list)
    split_shares: dict[str, float] = {}
    gathered: dict[str, float] = {}
    for row in records() if rows is None else rows:
        name, layout = (row["model_type"], row["class"]), _layout_key(row)
        if not row["changes"]:
            by_class[name][layout] = row
            if row["passed"] and row.get("split", 1.0) < 0.5:
                split_shares[row["class"]] = row["split"]
            if row["passed"] and "whole" in row:
                gathered[row["class"]] = row["whole"]
        else:
            changed_configs[name][_render_changes(row)].append(row)
    lines = [
        f"| model type | class | {' | '.join(COLUMNS)} | also compared with | for example |",
        "|---|---" + "|---" * len(COLUMNS) + "|---|---|",
    ]
    names = json.loads(Path(__file__).with_name("checkpoint_names.json").read_text(encoding="utf-8"))
    for name, results in sorted(by_class.items()):
        cells = [_render_cell(results.get(column)) for column in COLUMNS.values()]
        lines.append(
            f"| {' | '.join((*name, *cells))} | {_render_changed(changed_configs[name])} | {names.get(name[0], '')} |"
        )
        for heading, column in COLUMNS.items():
            if column in results and not results[column]["passed"]:
                reasons[_REASON.sub("", results[column]["worst"])].append(f"{name[1]} on {heading.replace(' ', '')}")
    shares, blocks = (
        ", ".join(f"{name} ({share:.0%})" for name, share in sorted(class_shares.items()))
        for class_shares in (split_shares, gathered)
    )
    refused = "".join(f"- {', '.join(cases)}: {reason}\n" for reason, cases in reasons.items())
    return (
        "\n".join(lines)
        + "\n"
        + (
            "\nTensor parallelism splits less than half of the layers' parameters (default config; share in brackets): "
            f"{shares}.\n"
            if shares
            else ""
        )
        + (
            "\nWith context parallelism, every rank computes blocks with their own token mixing on the full sequence. "
            f"Their share of the layers' parameters: {blocks}.\n"
            if blocks
            else ""
        )
        + (f"\nNot supported, with the recorded reason:\n\n{refused}" if refused else "")
    )


def _render_changed(compared: Mapping[str, list[Mapping[str, Any]]]) -> str:
    """Renders the changed configs that passed, with the layouts on which they failed."""
    headings = {column: heading.replace(" ", "") for heading, column in COLUMNS.items()}
    texts = []
    for changes, rows in sorted(compared.items()):
        layouts = {_layout_key(row): row["passed"] for row in rows}
        failed = [headings[column] for column in headings if layouts.get(column) is False]
        if any(layouts.values()):
            texts.append(changes + (f" (not on {', '.join(failed)})" if failed else ""))
    return "; ".join(texts)


def _render_changes(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={json.dumps(value)}`" for name, value in sorted(row["changes"].items()))


def render_support_summary(rows: Iterable[Mapping[str, Any]] | None = None) -> str:
    """Renders the number of passing model classes per layout as a sentence."""
    default_rows = [row for row in (records() if rows is None else rows) if not row["changes"]]
    classes = {(row["model_type"], row["class"]) for row in default_rows}
    passed = Counter(_layout_key(row) for row in default_rows if row["passed"])
    compared = Counter(_layout_key(row) for row in default_rows)
    counts = ", ".join(
        f"{passed[column]} of {compared[column]} on {heading.replace(' ', '')}" for heading, column in COLUMNS.items()
    )
    return (
        "Loss, every gradient and the weights after two optimizer steps were compared with a single process for "
        f"{len(classes)} model classes. Equal are {counts}. A kind of layout "
        "without an equal result [raises](docs/supported_models.md).\n"
    )


def update_page(path: Path) -> None:
    """Updates the table and the summary between the markers of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    for name, content in (("support table", render_support_table()), ("support summary", render_support_summary())):
        begin, end = (marker.format(name) for marker in _PART)
        before, separator, rest = text.partition(begin)
        if separator:
            text = before + begin + content + end + rest.partition(end)[2]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        update_page(Path(argument))

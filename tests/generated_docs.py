"""Generator of documentation that is derived from the code: `python -m tests.generated_docs`.

docs/data_parallel.md  optimizers and layouts, from the tested rows (`tests.helpers.optimizers`); Muon's memory
docs/patches.md   every replaced function and attribute
docs/surface.md   training-loop patterns per layout, recorded by `python -m tests.helpers.loop_patterns`
docs/tensor_parallel.md  graphs of compiled layers (`tests.helpers.compiled_graphs`)
docs/versions.md  tested library versions, recorded by `python -m tests.matrix`
"""

import json
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from hf_megatron.compat.instance_patches import INSTANCE_PATCHES
from hf_megatron.compat.patch_registry import Patch
from hf_megatron.integrations.patch_table import PATCHES, PATTERNS
from tests.helpers import compiled_graphs, optimizers
from tests.helpers.loop_patterns import render_table
from tests.matrix import render_table as versions
from tests.structure import ROOT


def shorten_targets(targets: Sequence[str]) -> str:
    """Returns the targets of one replacement as Markdown, with their common prefix and suffix written once."""
    if len(targets) == 1:
        return f"`{targets[0]}`"
    # Split at the separators of dotted paths, so that no name is split.
    prefix = re.sub(r"[^.:]*$", "", os.path.commonprefix(list(targets)))
    rest = [target[len(prefix) :] for target in targets]
    suffix = re.sub(r"^[^.:]*", "", os.path.commonprefix([text[::-1] for text in rest])[::-1])
    middles = ", ".join(f"`{text[: len(text) - len(suffix)]}`" for text in rest)
    return f"`{prefix}*{suffix}` for {middles}"


def patches() -> str:
    replacements: dict[str, list[Patch]] = {}
    for patch in PATCHES:
        replacements.setdefault(patch.replacement, []).append(patch)
    rows = []
    for group in replacements.values():
        timing = dict.fromkeys("import" if patch.is_entry_point else "first model" for patch in group)
        access = dict.fromkeys("private" if patch.is_private else "public" for patch in group)
        columns = (
            [shorten_targets([patch.target for patch in group])],
            [f"{' and '.join(access)}; {' and '.join(timing)}"],
            dict.fromkeys(patch.stock for patch in group),
            dict.fromkeys(patch.until for patch in group),
        )
        rows.append("| " + " | ".join("; ".join(column) for column in columns) + " |")
    for pattern in PATTERNS:
        target = f"`{pattern.target}` in every module that defines it as `({', '.join(pattern.parameters)})`"
        if pattern.excluded:
            target += f", except in {', '.join(f'`{name}`' for name in pattern.excluded)}"
        rows.append(f"| {target} | public; first model | {pattern.stock} | {pattern.until} |")
    head = ["| replaced | API; applied at | stock | needed until |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def render_instance_patches() -> str:
    rows = [f"| `{name}` | {patch.stock} | {patch.until} |" for name, patch in INSTANCE_PATCHES.items()]
    return "\n".join(["| attribute | stock | needed until |", "|---|---|---|", *rows]) + "\n"


def gpu_runs() -> dict[str, Any]:
    """Reads the record of what ran on GPUs."""
    return json.loads((ROOT / "tests" / "data" / "gpu_runs.json").read_text(encoding="utf-8"))


def gpu_table() -> str:
    record = gpu_runs()
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    rows = [f"| {' | '.join(row)} |" for row in record["runs"]]
    head = [
        f"Hardware: {record['hardware']}. Versions: {versions}.",
        "",
        "| what | layouts | equal to |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, "", *record["notes"]]) + "\n"


def gpu_gaps() -> str:
    return "".join(f"- {gap}\n" for gap in gpu_runs()["not_run"])


def gpu_status() -> str:
    record = gpu_runs()
    text = (
        f"Alpha. The CPU tests run over gloo. {len(record['runs'])} comparisons also ran on {record['hardware']}. "
        f"Not run on a GPU, [among others](docs/gpu.md): {', '.join(record['not_run'][:4])}."
    )
    return textwrap.fill(text, 80) + "\n"


def render_muon_memory() -> str:
    """Renders Muon's and AdamW's state per rank, as `benchmarks/muon_memory.py` counted it."""
    path = ROOT / "benchmarks" / "results" / "muon_memory_cpu.json"
    lines = ["| layout | Muon | AdamW |", "|---|---|---|"]
    for layout, row in json.loads(path.read_text(encoding="utf-8"))["rows"].items():
        muon, adamw = (max(row[f"{kind}_bytes_per_rank"]) / 2**20 for kind in ("muon", "adamw"))
        lines.append(f"| {layout} | {muon:.2f} | {adamw:.2f} |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"status": gpu_status},
    "docs/data_parallel.md": {"optimizers": optimizers.render_table, "Muon memory": render_muon_memory},
    "docs/gpu.md": {"GPU runs": gpu_table, "not run": gpu_gaps},
    "docs/patches.md": {"patches": patches, "instance patches": render_instance_patches},
    "docs/surface.md": {"loop patterns": render_table},
    "docs/tensor_parallel.md": {"compiled graphs": compiled_graphs.render_table},
    "docs/versions.md": {"versions": versions},
}


def render_page(page: str) -> str:
    """Returns the text of a page with updated generated parts."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, part in PARTS[page].items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        assert begin and end, f"{page} has no place for {name}"
        text = before + begin + part() + end + after
    return text


if __name__ == "__main__":
    for page in PARTS:
        (ROOT / page).write_text(render_page(page), encoding="utf-8")

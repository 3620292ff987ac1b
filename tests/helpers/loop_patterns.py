"""Results of each training-loop pattern on each layout: `python -m tests.helpers.loop_patterns [layout ...]` records
them.

Each pattern is run and compared with the single-process run. `tests/data/loop_patterns.json` has the judgments,
docs/surface.md shows them, and `tests/integration/fuzz/test_patterns.py` reproduces them.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "loop_patterns.json"
LAYOUTS = ("tp2", "tp2+sp", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "pp2", "tp2+pp2", "cp2")
HEADINGS = {"dp2+zero0": "dp2, stage 0", "dp2": "stage 1", "dp2+zero2": "stage 2", "dp2+zero3": "stage 3"}
# Judgments that a cell may have; all others are defects.
ALLOWED = ("equal", "refused", "raises alike")


def run_patterns(layout: str, names: list[str] | None = None, timeout: float = 60.0) -> dict[str, dict]:
    """Runs patterns on a layout; returns their judgments with the evidence."""
    from tests.fuzz.cases import simple_case
    from tests.fuzz.patterns import LOOP_PATTERNS
    from tests.fuzz.runner import run_cases

    selected = list(LOOP_PATTERNS) if names is None else names
    models = {name: "mixtral" if "experts" in LOOP_PATTERNS[name].needs else "llama" for name in selected}
    cases = [simple_case(layout, name, model) for name, model in models.items()]
    return {case["loop_patterns"][0]: result for case, result in run_cases(cases, timeout)}


def load_results() -> dict[str, dict[str, list[str]]]:
    """Returns the recorded [judgment, error message if unsupported], by pattern and layout."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def record_results(layouts: tuple[str, ...] = LAYOUTS) -> None:
    from tests.fuzz.patterns import LOOP_PATTERNS

    for layout in layouts:
        results = load_results()
        for name, result in run_patterns(layout).items():
            reason = re.sub(r"\s+", " ", result["worst"])[:160] if result["judgment"] == "refused" else ""
            results.setdefault(name, {})[layout] = [result["judgment"], reason]
            if result["judgment"] not in ALLOWED:
                print(f"{layout:10} {name:26} {result['judgment']:15} {result['worst'][:150]}", flush=True)
        ordered = {
            name: {place: results[name][place] for place in LAYOUTS if place in results.get(name, {})}
            for name in LOOP_PATTERNS
        }
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in ordered.items())
        DATA.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def render_table() -> str:
    """Renders the patterns and their judgments as Markdown, then the reasons of unsupported ones."""
    from tests.fuzz.patterns import LOOP_PATTERNS

    rows = load_results()
    lines = ["| a loop | equal | not supported | a single process raises too |", "|---|---|---|---|"]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, loop_pattern in LOOP_PATTERNS.items():
        layouts: dict[str, list[str]] = {"equal": [], "refused": [], "raises alike": []}
        for layout, (judgment, reason) in rows[name].items():
            layouts[judgment].append(HEADINGS.get(layout, layout))
            if reason:
                reasons[f"{name}: {reason.partition('. ')[0]}"].append(HEADINGS.get(layout, layout))
        cells = ["all" if len(cell) == len(LAYOUTS) else ", ".join(cell) for cell in layouts.values()]
        lines.append(f"| {loop_pattern.description} | {' | '.join(cells)} |")
    refused = [f"- {', '.join(where)}: {reason}" for reason, where in reasons.items()]
    return "\n".join(lines) + "\n" + ("\nNot supported:\n\n" + "\n".join(refused) + "\n" if refused else "")


if __name__ == "__main__":
    import warnings

    import torch
    import transformers

    import hf_megatron  # noqa: F401

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    record_results(tuple(sys.argv[1:]) or LAYOUTS)

"""Shrinks a failing case, one field at a time, as long as it still fails."""

from collections.abc import Iterator
from typing import Any

from tests.fuzz.cases import BATCH, count_ranks, fits
from tests.fuzz.judging import ACCEPTED
from tests.fuzz.models import simplest
from tests.fuzz.runner import run_cases

_SIMPLER_BATCH = {**BATCH, "rows": 2, "length": 5, "steps": 1, "mask": "none"}


def simpler(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields changes that each simplify one field of the case."""
    if len(case["loop_patterns"]) > 1:
        for loop_pattern in case["loop_patterns"]:
            yield {"loop_patterns": [loop_pattern]}
    if case["loop_patterns"] != ["plain"]:
        yield {"loop_patterns": ["plain"]}
    if case["type"] != "llama":
        yield simplest("llama")
    base = simplest(case["type"])
    if base["config"] != case["config"] and base["task"] == case["task"]:
        yield {"config": base["config"]}
        for field, value in case["config"].items():
            if base["config"].get(field) != value:
                config = {name: old for name, old in case["config"].items() if name != field}
                yield {"config": config | {field: base["config"][field]} if field in base["config"] else config}
    plain = {"dtype": "float32", "way": "from_pretrained", "optimizer": "sgd", "loop": "plain"}
    yield from ({field: value} for field, value in plain.items() if case[field] != value)
    yield from _simpler_layouts(case)
    for field, value in _SIMPLER_BATCH.items():
        if case["batch"][field] != value:
            yield {"batch": case["batch"] | {field: value}}


def _simpler_layouts(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    layout = case["layout"]
    for field in layout:
        less = {name: value for name, value in layout.items() if name != field}
        if field == "tp_size":
            less.pop("sequence_parallel", None)
        if field == "dp_size":
            less.pop("zero_stage", None)
        if count_ranks(less) > 1:
            yield {"layout": less}
        if isinstance(layout[field], int) and layout[field] > 2 and field.endswith("size"):
            yield {"layout": layout | {field: 2}}


def shrink(case: dict[str, Any], judgment: str, timeout: float = 20.0, rounds: int = 4) -> dict[str, Any]:
    """Returns the simplest case found with the same judgment.

    Args:
        case: failing case.
        judgment (`str`): judgment to preserve.
        timeout (`float`): seconds per case.
        rounds (`int`): number of rounds that try all simplifications.
    """

    def failing(candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [candidate for candidate, result in run_cases(candidates, timeout) if result["judgment"] == judgment]

    assert judgment not in ACCEPTED
    for _ in range(rounds):
        changes = [change for change in simpler(case) if _is_valid(case | change)]
        failed = failing([case | change for change in changes])
        failing_changes = [change for change in changes if case | change in failed]
        if not failing_changes:
            return case
        combined_case = case
        for change in reversed(failing_changes):
            combined_case = _apply_change(combined_case, case, change)
        several = len(failing_changes) > 1 and _is_valid(combined_case) and failing([combined_case])
        case = combined_case if several else case | failing_changes[0]
    return case


def _apply_change(case: dict[str, Any], before: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Applies a change computed for the case `before`; nested fields are merged."""
    case = dict(case)
    for field, value in change.items():
        if isinstance(value, dict) and isinstance(before.get(field), dict) and field in ("batch", "layout"):
            old = before[field]
            changed = {name: new for name, new in value.items() if old.get(name) != new}
            remaining = {name: now for name, now in case[field].items() if name in value or name not in old}
            case[field] = remaining | changed
        else:
            case[field] = value
    return case


def _is_valid(case: dict[str, Any]) -> bool:
    layout = case["layout"]
    return (
        count_ranks(layout) > 1
        and all(fits(case, loop_pattern) for loop_pattern in case["loop_patterns"])
        and case["batch"]["rows"] >= layout.get("dp_size", 1)
        and ("sequence_parallel" not in layout or "tp_size" in layout)
    )

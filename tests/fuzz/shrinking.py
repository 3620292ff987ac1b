"""Makes a case that differs simpler, one thing at a time, as long as it still fails."""

from collections.abc import Iterator
from typing import Any

from tests.fuzz.cases import BATCH, fits, ranks_of
from tests.fuzz.judging import ACCEPTED
from tests.fuzz.models import simplest
from tests.fuzz.runner import run_cases

_SIMPLER_BATCH = {**BATCH, "rows": 2, "length": 5, "steps": 1, "mask": "none"}


def simpler(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what has to change, to make the case simpler in one thing each."""
    if len(case["habits"]) > 1:
        for loop_pattern in case["habits"]:
            yield {"habits": [loop_pattern]}
    if case["habits"] != ["plain"]:
        yield {"habits": ["plain"]}
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
        if ranks_of(less) > 1:
            yield {"layout": less}
        if isinstance(layout[field], int) and layout[field] > 2 and field.endswith("size"):
            yield {"layout": layout | {field: 2}}


def shrink(case: dict[str, Any], judgment: str, timeout: float = 20.0, rounds: int = 4) -> dict[str, Any]:
    """Returns the simplest case found with the same judgment.

    Args:
        case: that fails.
        judgment (`str`): that it has to keep.
        timeout (`float`): seconds of one case.
        rounds (`int`): of trying everything that is simpler.
    """

    def failing(candidates: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [found for found, result in run_cases(candidates, timeout) if result["judgment"] == judgment]

    assert judgment not in ACCEPTED
    for _ in range(rounds):
        changes = [change for change in simpler(case) if _makes_sense(case | change)]
        failed = failing([case | change for change in changes])
        kept = [change for change in changes if case | change in failed]
        if not kept:
            return case
        together = case
        for change in reversed(kept):
            together = _with(together, case, change)
        several = len(kept) > 1 and _makes_sense(together) and failing([together])
        case = together if several else case | kept[0]
    return case


def _with(case: dict[str, Any], before: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Applies a change that was made for another case: of nested fields only what it changes."""
    case = dict(case)
    for field, value in change.items():
        if isinstance(value, dict) and isinstance(before.get(field), dict) and field in ("batch", "layout"):
            old = before[field]
            changed = {name: new for name, new in value.items() if old.get(name) != new}
            kept = {name: now for name, now in case[field].items() if name in value or name not in old}
            case[field] = kept | changed
        else:
            case[field] = value
    return case


def _makes_sense(case: dict[str, Any]) -> bool:
    layout = case["layout"]
    return (
        ranks_of(layout) > 1
        and all(fits(case, loop_pattern) for loop_pattern in case["habits"])
        and case["batch"]["rows"] >= layout.get("dp_size", 1)
        and ("sequence_parallel" not in layout or "tp_size" in layout)
    )

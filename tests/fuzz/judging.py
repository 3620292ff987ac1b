"""What the ranks did against what one process did: equal, refused, or a finding."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hf_megatron.testing.tolerances import GRADIENT_FLOOR, LOSS, Error, Judgement
from tests.fuzz.patterns import patterns_of

# Three steps with momentum carry the round-off of the first into the later ones.
_LOGGED = 10 * LOSS
_MOVED = 2e-4
# Of a weight, which is stored with this error whatever it has moved.
_ROUND_OFF = 4e-7
# The optimizer's fp32 weights are better than bf16 ones of one process: only faults of the weights' size are seen.
_HALF = (0.15, 0.4, 0.04, 0.5)
# Trainer rounds what it logs.
_TRAINER = 2e-4

ACCEPTED = ("equal", "refused", "raises alike", "goes on", "unstable")


def _tolerance(case: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Returns what logged numbers, movements and weights may be off by, and the share of the largest that counts."""
    if case["dtype"] != "float32" or "bfloat16" in case["habits"]:
        return _HALF
    return (_TRAINER if case["loop"] == "trainer" else _LOGGED), _MOVED, _ROUND_OFF, GRADIENT_FLOOR


def judge_case(
    case: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    one: Mapping[str, Any] | None,
    folders: Mapping[str, Path],
) -> dict[str, Any]:
    """Returns the verdict of a case and what it rests on.

    Args:
        ranks: what `run_loop` returned on each rank.
        one: what it returned in one process; `None` where only the ranks are compared.
        folders: of the weights at the start, of those of one process and of the ranks.
    """
    failure = _failure(case, ranks, one)
    if failure is not None:
        return failure
    apart = _apart(ranks)
    if apart:
        return {"judgment": "ranks disagree", "worst": apart}
    if one is None:
        return {"judgment": "equal", "worst": "the ranks agree"}
    if "error" in one:
        trips = any(
            loop_pattern.trips and one["steps"] >= loop_pattern.acts for loop_pattern in patterns_of(case["habits"])
        )
        return {
            "judgment": "goes on" if trips else "accepted",
            "worst": f"one process raises {one['error'][:200]}, the ranks train on",
        }
    judgement = compare_runs(case, ranks, one, folders)
    judgment = "equal" if judgement.passed else "differs"
    return {"judgment": judgment, "worst": str(judgement.worst), "error": _finite(judgement.worst.value)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _failure(
    case: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], one: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    failed = [rank for rank in ranks if "error" in rank]
    if not failed:
        return None
    allowed = {one["kinds"][0]} if one is not None and "error" in one else set()
    # A rank that only notices that others are gone says nothing.
    speaks = [rank for rank in failed if "MegatronError" in rank["kinds"] or rank["kinds"][0] in allowed]
    acts = max((loop_pattern.acts for loop_pattern in patterns_of(case["habits"])), default=0)
    found = (speaks or failed)[0]
    worst = found["error"][:300]
    if any("Hang" in rank["kinds"] for rank in ranks):
        return {"judgment": "hang", "worst": worst, "traceback": found["traceback"]}
    if speaks and len(failed) == len(ranks):
        if found["steps"] <= acts or (one is not None and "error" in one and found["steps"] == one["steps"]):
            is_alike = not any("MegatronError" in rank["kinds"] for rank in speaks)
            return {"judgment": "raises alike" if is_alike else "refused", "worst": worst}
        return {"judgment": "refused late", "worst": f"after {found['steps']} steps: {worst}"}
    if speaks:
        return {"judgment": "ranks disagree", "worst": f"{len(failed)} of {len(ranks)} raise: {worst}"}
    return {"judgment": "crash", "worst": worst, "traceback": found["traceback"]}


def _apart(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Names what two ranks that hold the same have different."""
    for number, rank in enumerate(ranks[1:], 1):
        for (name, a), (_, b) in zip(ranks[0]["logged"], rank["logged"], strict=False):
            if not (a == b or abs(a - b) <= LOSS * abs(b) or (a != a and b != b)):
                return f"{name}: {a:.7g} on rank 0, {b:.7g} on rank {number}"
    marks: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        for name, mark in rank["marks"].items():
            if marks.setdefault(name, mark) != mark:
                return f"{name} has other bits on rank {number}"
    return ""


def compare_runs(
    case: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    one: Mapping[str, Any],
    folders: Mapping[str, Path],
) -> Judgement:
    """Compares every logged number of every rank, and how each weight has moved."""
    logged, moved, round_off, floor = _tolerance(case)
    start, found, expected = (_weights(folders[name]) for name in ("start", "ranks", "one"))
    comparable, errors = None, []
    if not all(weight.isfinite().all() for weight in expected.values()):
        # Behind a gradient that is none the step was skipped, as docs/surface.md says; one process has it in weights.
        comparable = next((n for n, (_, b) in enumerate(one["logged"], 1) if not math.isfinite(b)), None)
    for number, rank in enumerate(ranks):
        names = [name for name, _ in rank["logged"]], [name for name, _ in one["logged"]]
        if names[0] != names[1]:
            errors.append(Error(f"rank {number} logs other things than one process", math.inf))
        pairs = list(zip(rank["logged"], one["logged"], strict=False))[:comparable]
        for position, ((name, a), (_, b)) in enumerate(pairs):
            following = [number for _, number in one["logged"][position + 1 : position + 2]]
            if name == "loss" and b == 0 and not all(map(math.isfinite, following)):
                # What Trainer logs of a loss that is no number: each rank leaves out its own part.
                continue
            value = abs(a - b) / max(abs(b), 1e-6) / logged
            value = 0.0 if a == b or (a != a and b != b) else value if value == value else math.inf
            errors.append(
                Error(f"{name} (number {position} logged, rank {number}): {a:.7g}, one process {b:.7g}", value)
            )
    was_nan = any(not math.isfinite(value) for _, value in one["logged"])
    largest = max((_largest(expected[name] - start[name]) for name in expected if name in start), default=0.0)
    for name, b in expected.items():
        if name not in found or found[name].shape != b.shape:
            errors.append(Error(f"{name} is not among the saved weights", math.inf))
            continue
        if was_nan and not b.isfinite().all():
            continue
        way = _largest(b - start[name]) if name in start else 0.0
        limit = moved * max(way, floor * largest) + round_off * _largest(b) + 1e-12
        value = _largest(found[name] - b) / limit
        errors.append(Error(f"{name} after training", value if value == value else math.inf))
    errors += [Error(f"{name} is surplus among the saved weights", math.inf) for name in found.keys() - expected.keys()]
    return Judgement(tuple(sorted(errors, key=lambda error: -error.value)))


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: value.double() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}

"""Judgment of a case: compares the ranks with the single-process run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from hf_megatron.testing.tolerances import GRADIENT_FLOOR, LOSS, Error, ParityComparison
from tests.fuzz.patterns import get_patterns

# Over three steps with momentum, rounding errors of the first accumulate.
_LOGGED = 10 * LOSS
_MOVED = 2e-4
# Relative rounding error of a stored weight, independent of its update.
_ROUND_OFF = 4e-7
# The optimizer's fp32 main weights are more precise than bf16 weights of a single process: only large faults show.
_HALF = (0.15, 0.4, 0.04, 0.5)
# Trainer rounds what it logs.
_TRAINER = 2e-4

ACCEPTED = ("equal", "refused", "raises alike", "goes on", "unstable")


def _tolerance(case: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Returns tolerances of logged values, updates and weights, and the floor relative to the largest update."""
    if case["dtype"] != "float32" or "bfloat16" in case["loop_patterns"]:
        return _HALF
    return (_TRAINER if case["loop"] == "trainer" else _LOGGED), _MOVED, _ROUND_OFF, GRADIENT_FLOOR


def judge_case(
    case: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    one: Mapping[str, Any] | None,
    folders: Mapping[str, Path],
) -> dict[str, Any]:
    """Returns the judgment of a case and its reason.

    Args:
        ranks: results of `run_loop` on each rank.
        one: its single-process result; `None` if only the ranks are compared.
        folders: folders of the weights: `"start"`, `"one"` (single process) and `"ranks"`.
    """
    failure = _judge_failure(case, ranks, one)
    if failure is not None:
        return failure
    disagreement = _find_disagreement(ranks)
    if disagreement:
        return {"judgment": "ranks disagree", "worst": disagreement}
    if one is None:
        return {"judgment": "equal", "worst": "the ranks agree"}
    if "error" in one:
        trips = any(
            loop_pattern.trips and one["steps"] >= loop_pattern.acts
            for loop_pattern in get_patterns(case["loop_patterns"])
        )
        return {
            "judgment": "goes on" if trips else "accepted",
            "worst": f"one process raises {one['error'][:200]}, the ranks train on",
        }
    judgement = compare_runs(case, ranks, one, folders)
    judgment = "equal" if judgement.passed else "differs"
    return {"judgment": judgment, "worst": str(judgement.worst), "error": _finite_or_none(judgement.worst.value)}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _judge_failure(
    case: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], one: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    failed = [rank for rank in ranks if "error" in rank]
    if not failed:
        return None
    allowed = {one["kinds"][0]} if one is not None and "error" in one else set()
    # A rank that only reports the loss of other ranks is not informative.
    reporting = [rank for rank in failed if "MegatronError" in rank["kinds"] or rank["kinds"][0] in allowed]
    acts = max((loop_pattern.acts for loop_pattern in get_patterns(case["loop_patterns"])), default=0)
    first = (reporting or failed)[0]
    worst = first["error"][:300]
    if any("Hang" in rank["kinds"] for rank in ranks):
        return {"judgment": "hang", "worst": worst, "traceback": first["traceback"]}
    if reporting and len(failed) == len(ranks):
        if first["steps"] <= acts or (one is not None and "error" in one and first["steps"] == one["steps"]):
            is_alike = not any("MegatronError" in rank["kinds"] for rank in reporting)
            return {"judgment": "raises alike" if is_alike else "refused", "worst": worst}
        return {"judgment": "refused late", "worst": f"after {first['steps']} steps: {worst}"}
    if reporting:
        return {"judgment": "ranks disagree", "worst": f"{len(failed)} of {len(ranks)} raise: {worst}"}
    return {"judgment": "crash", "worst": worst, "traceback": first["traceback"]}


def _find_disagreement(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describes the first difference between ranks that must agree, or returns an empty string."""
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
) -> ParityComparison:
    """Compares all logged values of every rank and the update of each weight."""
    logged, moved, round_off, floor = _tolerance(case)
    start, rank_weights, expected = (_load_weights(folders[name]) for name in ("start", "ranks", "one"))
    comparable, errors = None, []
    if not all(weight.isfinite().all() for weight in expected.values()):
        # Ranks skip the step after a non-finite gradient (docs/surface.md); a single process applies it.
        comparable = next((n for n, (_, b) in enumerate(one["logged"], 1) if not math.isfinite(b)), None)
    for number, rank in enumerate(ranks):
        names = [name for name, _ in rank["logged"]], [name for name, _ in one["logged"]]
        if names[0] != names[1]:
            errors.append(Error(f"rank {number} logs other things than one process", math.inf))
        pairs = list(zip(rank["logged"], one["logged"], strict=False))[:comparable]
        for position, ((name, a), (_, b)) in enumerate(pairs):
            following = [number for _, number in one["logged"][position + 1 : position + 2]]
            if name == "loss" and b == 0 and not all(map(math.isfinite, following)):
                # The NaN filter of Trainer logs 0 in a single process; on ranks each filters only its local loss.
                continue
            value = abs(a - b) / max(abs(b), 1e-6) / logged
            value = 0.0 if a == b or (a != a and b != b) else value if value == value else math.inf
            errors.append(
                Error(f"{name} (number {position} logged, rank {number}): {a:.7g}, one process {b:.7g}", value)
            )
    was_nan = any(not math.isfinite(value) for _, value in one["logged"])
    largest = max((_max_abs(expected[name] - start[name]) for name in expected if name in start), default=0.0)
    for name, b in expected.items():
        if name not in rank_weights or rank_weights[name].shape != b.shape:
            errors.append(Error(f"{name} is not among the saved weights", math.inf))
            continue
        if was_nan and not b.isfinite().all():
            continue
        movement = _max_abs(b - start[name]) if name in start else 0.0
        limit = moved * max(movement, floor * largest) + round_off * _max_abs(b) + 1e-12
        value = _max_abs(rank_weights[name] - b) / limit
        errors.append(Error(f"{name} after training", value if value == value else math.inf))
    errors += [
        Error(f"{name} is surplus among the saved weights", math.inf) for name in rank_weights.keys() - expected.keys()
    ]
    return ParityComparison(tuple(sorted(errors, key=lambda error: -error.value)))


def _max_abs(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _load_weights(folder: Path) -> dict[str, Tensor]:
    return {name: value.double() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}

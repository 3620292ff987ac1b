"""The metric of a parity case, and its limits.

Limits (fp32). Calibrated on correct code over the recorded model types at tp2, tp2+sp and tp4;
`docs/design/verification.md` has the observed errors.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .measure import Measurement

LOSS = 1e-6
NORM = 1e-6
GRADIENT = 1e-5
# Gradients much smaller than the model's largest are compared with this share of the largest. Those of key biases, zero
# in exact arithmetic, are off by up to 3.2e-8 of the largest in one process: 3.2 limits with a share of 1e-3.
GRADIENT_FLOOR = 5e-3
# Of what is zero in exact arithmetic and the round-off of many terms in fp32: up to 6.5e-7 of the largest, where a head
# adds one number to the logits of all tokens.
CANCELLED_FLOOR = 0.2
# Of the largest, in fp64.
_CANCELLED = 1e-12
WEIGHTS = 1e-5
# The reference's own round-off, fp32 against fp64 in one process, in limits: of a twin with more another draw is tried.
WELL_CONDITIONED = 0.5
# How much further than the reference itself another order of the same sums may be off: 4.7 times at most on correct
# code (sinks of gpt-oss, on one of several processors; 3.6 times for question answering on a tiny bert, whose gradients
# cancel over the positions of a row), and twice that where no draw of a twin is well conditioned.
AMPLIFIED = 6
# A reference that is off by more than two limits is none.
_LARGEST_SLACK = 16


@dataclass(frozen=True)
class Error:
    """One compared quantity: `value` is its error over the limit, so that more than 1 is a mismatch."""

    quantity: str
    value: float

    def __str__(self) -> str:
        return f"{self.quantity}: {self.value:.3g} x the limit"


@dataclass(frozen=True)
class Judgement:
    """All errors of one case, the worst first."""

    errors: tuple[Error, ...]

    @property
    def worst(self) -> Error:
        return self.errors[0]

    @property
    def passed(self) -> bool:
        return self.worst.value <= 1

    def report(self, count: int = 8) -> str:
        bad = [error for error in self.errors if not error.value <= 1]
        lines = [f"{len(bad)} of {len(self.errors)} quantities differ from one process; worst:"] if bad else []
        return "\n".join([*lines, *(f"  {error}" for error in self.errors[:count])])


def _relative(a: float, b: float, limit: float) -> float:
    error = abs(a - b) / max(abs(b), 1e-30) / limit
    return error if error == error else float("inf")


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _tensor_error(a: Tensor, b: Tensor, scale: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    difference = _largest(a.double() - b.double())
    if difference != difference:
        return float("inf")
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def judge(found: Measurement, reference: Measurement) -> Judgement:
    """Compares a measurement with the one-process reference, to no more digits than the reference has."""
    amplified = AMPLIFIED * reference.round_off * (1 if reference.round_off <= WELL_CONDITIONED else 2)
    slack = min(max(amplified, 1.0), _LARGEST_SLACK)
    errors = [
        Error("loss", _relative(found.loss, reference.loss, LOSS)),
        Error("eval loss", _relative(found.eval_loss, reference.eval_loss, LOSS)),
        # Made of the gradients, it is as uncertain as they are.
        Error("gradient norm", _relative(found.norm, reference.norm, NORM) / slack),
        *(Error(error.quantity, error.value / slack) for error in gradient_errors(found, reference)),
    ]
    # Steps of AdamW enlarge round-off of small entries: where every draw's own weights are uncertain, so are others.
    uncertain = slack if reference.round_off > WELL_CONDITIONED else 1.0
    for optimizer, weights in reference.weights.items():
        for name, b in weights.items():
            a = found.weights.get(optimizer, {}).get(name)
            value = float("inf") if a is None else _tensor_error(a, b, _largest(b) * WEIGHTS) / uncertain
            errors.append(Error(f"{name} after {optimizer}", value))
    return Judgement(tuple(sorted(errors, key=lambda error: -error.value)))


def frozen_errors(found: Measurement, reference: Measurement) -> list[Error]:
    """Finds weights without a gradient that are not those of one process to the bit."""
    return [
        Error(f"{name}, which is frozen, after {optimizer}", float("inf"))
        for optimizer, weights in reference.weights.items()
        for name, weight in weights.items()
        if name not in reference.gradients and not torch.equal(found.weights[optimizer][name], weight)
    ]


def gradient_errors(found: Measurement, reference: Measurement) -> list[Error]:
    """Compares every gradient; one that a side has not is infinitely wrong, unless the reference is `without` it."""
    errors = []
    largest = max((_largest(g) for g in reference.gradients.values() if g is not None), default=0.0)
    for name in sorted(found.gradients.keys() | reference.gradients.keys()):
        a, b = found.gradients.get(name), reference.gradients.get(name)
        if a is None and b is None:
            if not any(re.search(pattern, name) for pattern in reference.without):
                errors.append(
                    Error(f"{name} has no gradient, in one process either: it was not compared", float("inf"))
                )
            continue
        if a is None or b is None:
            errors.append(Error(f"gradient of {name} is {'missing' if a is None else 'surplus'}", float("inf")))
            continue
        floor = CANCELLED_FLOOR if name in reference.cancelled else GRADIENT_FLOOR
        scale = max(_largest(b), floor * largest) * GRADIENT
        errors.append(Error(f"gradient of {name}", _tensor_error(a, b, scale)))
    return errors


def cancelled(precise: Measurement) -> frozenset[str]:
    """Names the parameters whose gradient is zero but for the round-off of an fp64 measurement."""
    sizes = {name: _largest(gradient) for name, gradient in precise.gradients.items() if gradient is not None}
    largest = max(sizes.values(), default=0.0)
    return frozenset(name for name, size in sizes.items() if size <= _CANCELLED * largest)

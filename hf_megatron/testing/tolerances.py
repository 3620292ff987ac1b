"""Error metric of a parity case, and its limits.

The limits are for fp32 and were calibrated on correct code over the recorded model types at tp2, tp2+sp and tp4;
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
# Errors of a gradient are relative to at least this share of the model's largest gradient. Gradients of key biases,
# zero in exact arithmetic, are off by up to 3.2e-8 of the largest in a single process: 3.2 limits with a share of 1e-3.
GRADIENT_FLOOR = 5e-3
# The same for gradients that are zero in exact arithmetic, so that fp32 leaves the round-off of many terms: up to
# 6.5e-7 of the largest gradient for a head that adds one value to the logits of all tokens.
CANCELLED_FLOOR = 0.2
# Share of the largest gradient below which an fp64 gradient counts as zero.
_CANCELLED = 1e-12
WEIGHTS = 1e-5
# Maximum round-off of a reference (fp32 against fp64 in a single process), in limits; above it, another draw is tried.
WELL_CONDITIONED = 0.5
# Allowed error of another summation order, as a multiple of the reference's round-off. Correct code has up to 4.7
# (sinks of gpt-oss on one of several CPUs; 3.6 for question answering on a tiny BERT, whose gradients cancel over the
# positions of a sequence). The multiple is doubled if no draw of a tiny model is well-conditioned.
AMPLIFIED = 6
# Upper bound of the slack: a reference with more round-off is not usable.
_LARGEST_SLACK = 16


@dataclass(frozen=True)
class Error:
    """Error of one compared quantity; `value` is relative to the limit, so that more than 1 is a mismatch."""

    quantity: str
    value: float

    def __str__(self) -> str:
        return f"{self.quantity}: {self.value:.3g} x the limit"


@dataclass(frozen=True)
class ParityComparison:
    """All errors of one case, sorted from worst to best."""

    errors: tuple[Error, ...]

    @property
    def worst(self) -> Error:
        return self.errors[0]

    @property
    def passed(self) -> bool:
        return self.worst.value <= 1

    def report(self, count: int = 8) -> str:
        bad = [error for error in self.errors if not error.value <= 1]
        lines = (
            [(f"{len(bad)} of {len(self.errors)} quantities differ from the single-process run; worst:")] if bad else []
        )
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


def judge(measurement: Measurement, reference: Measurement) -> ParityComparison:
    """Compares a measurement with the single-process reference, allowing for the round-off of the reference."""
    amplified = AMPLIFIED * reference.round_off * (1 if reference.round_off <= WELL_CONDITIONED else 2)
    slack = min(max(amplified, 1.0), _LARGEST_SLACK)
    errors = [
        Error("loss", _relative(measurement.loss, reference.loss, LOSS)),
        Error("eval loss", _relative(measurement.eval_loss, reference.eval_loss, LOSS)),
        # The norm has the same uncertainty as the gradients.
        Error("gradient norm", _relative(measurement.norm, reference.norm, NORM) / slack),
        *(Error(error.quantity, error.value / slack) for error in gradient_errors(measurement, reference)),
    ]
    # AdamW amplifies round-off of small gradients: if no draw is well-conditioned, its weights need slack as well.
    uncertain = slack if reference.round_off > WELL_CONDITIONED else 1.0
    for optimizer, weights in reference.weights.items():
        for name, b in weights.items():
            a = measurement.weights.get(optimizer, {}).get(name)
            value = float("inf") if a is None else _tensor_error(a, b, _largest(b) * WEIGHTS) / uncertain
            errors.append(Error(f"{name} after {optimizer}", value))
    return ParityComparison(tuple(sorted(errors, key=lambda error: -error.value)))


def frozen_errors(measurement: Measurement, reference: Measurement) -> list[Error]:
    """Returns errors for frozen weights that are not bit-equal to the single-process reference."""
    return [
        Error(f"{name}, which is frozen, after {optimizer}", float("inf"))
        for optimizer, weights in reference.weights.items()
        for name, weight in weights.items()
        if name not in reference.gradients and not torch.equal(measurement.weights[optimizer][name], weight)
    ]


def gradient_errors(measurement: Measurement, reference: Measurement) -> list[Error]:
    """Compares every gradient. A missing gradient is an infinite error, unless it is missing in both and expected."""
    errors = []
    largest = max((_largest(g) for g in reference.gradients.values() if g is not None), default=0.0)
    for name in sorted(measurement.gradients.keys() | reference.gradients.keys()):
        a, b = measurement.gradients.get(name), reference.gradients.get(name)
        if a is None and b is None:
            if not any(re.search(pattern, name) for pattern in reference.without):
                errors.append(
                    Error(f"{name} has no gradient in the single-process run either: it was not compared", float("inf"))
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
    """Returns the names of the parameters whose gradient in an fp64 measurement is zero up to round-off."""
    sizes = {name: _largest(gradient) for name, gradient in precise.gradients.items() if gradient is not None}
    largest = max(sizes.values(), default=0.0)
    return frozenset(name for name, size in sizes.items() if size <= _CANCELLED * largest)

"""Gradient status of an optimizer step: clipped, finite, scaled."""

from dataclasses import dataclass


@dataclass
class GradStatus:
    """What is known of the gradients of one step before optimizers take them.

    Attributes:
        clipped: the loop has clipped them.
        finite: whether all are, once somebody has looked at all of them.
        scaled: a loss scaler has looked at them and decides itself whether to step.
        used: an optimizer has stepped on it; another one of the same model may still.
    """

    clipped: bool = False
    finite: bool | None = None
    scaled: bool = False
    used: bool = False

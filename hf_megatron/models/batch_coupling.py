"""Types in whose forward the rows of a batch depend on each other: a part of a batch gives other numbers there."""

from collections.abc import Callable, Mapping
from typing import Any

# Model type -> (whether a config makes it so, why).
_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bamba": (lambda config: bool(config.z_loss_coefficient), "its z-loss counts padding, and so the longest row"),
    "doge": (lambda config: config.is_moe, "its router pairs tokens of different rows"),
    "nllb-moe": (lambda config: True, "its experts take a number of tokens of the whole batch"),
    "prophetnet": (lambda config: config.eps > 0, "the smoothing of its loss (eps) is a mean over a part's own labels"),
}


def batch_coupling_reason(config: Any) -> str | None:
    """Says why a model's rows cannot be computed apart from each other, or `None` where they can."""
    mixes, reason = _TYPES.get(config.model_type, (None, None))
    return reason if mixes is not None and mixes(config) else None

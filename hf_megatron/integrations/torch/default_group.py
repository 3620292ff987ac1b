"""Warning for a script's own collective over the default group between a forward and its backward.

torch itself imports the target, so nothing of torch may be imported before the wrapper is called.
"""

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...core.runtime import RUNTIME

# Collectives whose result contains the value of a replica once per rank.
_DEPEND_ON_RANKS = frozenset(
    f"{name}{variant}"
    for name in ("all_gather", "all_reduce", "all_to_all", "gather", "reduce", "reduce_scatter")
    for variant in ("", "_single", "_coalesced", "_object")
)


def default_group(original: Callable) -> Any:
    """Returns the default group, which torch looks up for calls without a group."""
    if RUNTIME.awaits_backward:
        _warn_about_collective(sys._getframe(2))
    return original()


def _warn_about_collective(frame: FrameType | None) -> None:
    """Warns once if the calls on the stack are a script's collective."""
    collective, depth = None, 4  # the frame's level in `warnings.warn`
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        name = frame.f_code.co_name
        collective = name if name in _DEPEND_ON_RANKS else collective
        frame, depth = frame.f_back, depth + 1
    if collective is None or frame is None or frame.f_globals.get("__name__", "").startswith("hf_megatron."):
        return
    RUNTIME.awaits_backward, RUNTIME.has_warned_of_collective = False, True
    import torch.distributed as dist

    if dist.get_rank() != 0:
        return
    warnings.warn(
        f"torch.distributed.{collective} over the default group between forward and backward: the ranks of a replica "
        "hold the same samples, so each sample counts once per rank. Pass group=hf_megatron.data_parallel_group().",
        stacklevel=depth,
    )

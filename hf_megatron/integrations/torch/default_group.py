"""Collectives of a script over the default group: a warning between a forward and its backward, an error in a step.

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

# Modules of torch's collectives.
_C10D = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


def default_group(original: Callable) -> Any:
    """Returns the default group, which torch looks up for calls without a group."""
    if RUNTIME.unprepared_step is not None:
        _reject_in_step(sys._getframe(2))
    elif RUNTIME.awaits_backward:
        _warn_about_collective(sys._getframe(2))
    return original()


def _reject_in_step(frame: FrameType | None) -> None:
    """Raises `UnsupportedError` for a collective of an optimizer whose ranks step on different parameters."""
    from ...errors import UnsupportedError

    is_collective = False
    while frame is not None and frame.f_globals.get("__name__") in _C10D:
        is_collective = is_collective or frame.f_code.co_name in _DEPEND_ON_RANKS
        frame = frame.f_back
    if not is_collective or frame is None or frame.f_globals.get("__name__", "").startswith(("torch.", "hf_megatron.")):
        return
    name, RUNTIME.unprepared_step = RUNTIME.unprepared_step, None
    raise UnsupportedError(
        f"{name} communicates over all ranks in its step, but some of them hold shards of one parameter. Use the "
        "single-process class, and pass it to hf_megatron.prepare_optimizer(optimizer, layer_wise=True)."
    )


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

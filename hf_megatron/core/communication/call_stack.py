"""Descriptions of Python stacks: the collective that a stack waits in, and the line of user code that led to it."""

import os
import re
import sys
import traceback
from types import FrameType, TracebackType

import torch.distributed as dist

from ...compat.torch_distributed import group_description

_COMMUNICATION = ("torch.distributed", "hf_megatron.core.communication", "hf_megatron.compat.torch_distributed")
_AUTOGRAD = "hf_megatron.compat.torch_autograd"
_SUFFIXES = re.compile("(_flat|_into_parts|_started|_)$")
_PIPELINE = ("hf_megatron.pipeline_parallel.p2p", "hf_megatron.pipeline_parallel.tied_weight_grads")
# Modules that block on a message from another rank, including those that call point-to-point operations.
_WAITING = (
    *_COMMUNICATION,
    *_PIPELINE,
    "hf_megatron.expert_parallel.all_to_all",
    "hf_megatron.data_parallel.grad_reducer",
    "hf_megatron.data_parallel.param_gather",
)
# Functions that wait for one other rank of a group, not for all.
_POINT_TO_POINT = frozenset(("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object", "recv_object"))
# Functions that every rank of a replica must call; a rank inside one of them waits for the others.
COLLECTIVE_CALLS = frozenset(
    (
        *("from_pretrained", "from_config", "save_pretrained", "push_to_hub", "state_dict", "get_state_dict"),
        *("generate", "train", "evaluate", "predict", "save_model", "save_state", "load_state"),
        "resize_token_embeddings",
    )
)
LIBRARIES = ("torch", "hf_megatron", "transformers", "accelerate", "trl", "peft", "contextlib", "threading", "runpy")


def is_in_packages(frame: FrameType, packages: tuple[str, ...]) -> bool:
    """Returns whether the code of a frame belongs to one of the packages."""
    name = str(frame.f_globals.get("__name__", "?"))
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _name(frame: FrameType) -> str:
    # `co_qualname` came with Python 3.11.
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name)).replace("<locals>.", "")


def traceback_frames(trace: TracebackType | None) -> list[FrameType]:
    """Returns the frames of a traceback, innermost first."""
    return [frame for frame, _ in traceback.walk_tb(trace)][::-1]


def operation(frames: list[FrameType]) -> str | None:
    """Describes the collective that a stack, innermost frame first, waits in; `None` if it is in none.

    Example: `all_reduce over mesh_tp in RowParallelLinear.forward (a.py:3)`.
    """
    # Skip torch's operator frames and context managers between a collective and its caller.
    inner = next((index for index, frame in enumerate(frames) if not is_in_packages(frame, ("torch._ops",))), 0)
    if not frames or not is_in_packages(frames[inner], _COMMUNICATION):
        return None
    outer = inner
    while outer < len(frames) and is_in_packages(frames[outer], (*_COMMUNICATION, "torch", _AUTOGRAD)):
        outer += 1
    run = [frame for frame in frames[inner:outer] if is_in_packages(frame, _COMMUNICATION)]
    calls = [
        frame for frame in run if is_in_packages(frame, ("torch.distributed",)) and frame.f_code.co_name != "wrapper"
    ]
    # This library's functions for collectives, such as `all_reduce_`, are named like torch's.
    name = _name(calls[-1]) if calls else _SUFFIXES.sub("", _name(run[0]))
    groups = [group_description(frame.f_locals.get("group")) for frame in run]
    group = next((description for description in groups if description), None)
    over = f" over {group}" if group else ""
    callers = [frame for frame in [*run, *frames[outer : outer + 1]] if is_in_packages(frame, ("hf_megatron",))]
    # The calling function of this library is more informative than the caller of backward.
    caller = callers[-1] if callers else frames[outer] if outer < len(frames) else None
    return f"{name}{over}{f' in {_name(caller)}' if caller else ''}{user_line(frames)}"


def find_waited_ranks(frames: list[FrameType]) -> list[int] | None:
    """Returns the ranks on which the communication depends that a stack, innermost frame first, waits in.

    Returns:
        `list[int]`: the ranks of the collective's group, or the attribute `waited_ranks` of the object whose method
        waits; `None` if they are not known.
    """
    for frame in frames:
        if not is_in_packages(frame, ("torch", *_WAITING)):
            break
        here = frame.f_locals
        ranks = getattr(here.get("self"), "waited_ranks", None)
        if ranks is not None:
            return list(ranks)
        if frame.f_code.co_name.removesuffix("_list") in _POINT_TO_POINT or is_in_packages(frame, _PIPELINE):
            # These wait for one rank of their group.
            return None
        for group in (here.get("group"), getattr(here.get("self"), "group", None)):
            if isinstance(group, dist.ProcessGroup):
                return dist.get_process_group_ranks(group)
        if here.get("group", here) is None and is_in_packages(frame, ("torch.distributed.distributed_c10d",)):
            return list(range(dist.get_world_size()))
    return None


def is_in_communication(frame: FrameType) -> bool:
    """Returns whether a stack's innermost frame, ignoring torch's operator frames, is in a collective."""
    inner: FrameType | None = frame
    while inner is not None and is_in_packages(inner, ("torch._ops",)):
        inner = inner.f_back
    return inner is not None and is_in_packages(inner, _WAITING)


def where(frame: FrameType) -> str:
    """Returns the function and line of a frame."""
    return f"{_name(frame)} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def user_line(frames: list[FrameType]) -> str:
    """Returns the innermost line outside the libraries."""
    lines = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames if not is_in_packages(frame, LIBRARIES))
    return next((f" ({os.path.basename(file)}:{number})" for file, number in lines), "")


def describe_location(frames: list[FrameType]) -> str:
    """Returns the location of a stack that is not in a collective."""
    return f"{_name(frames[0])}{user_line(frames)}" if frames else "no Python code"


def user_call(frames: list[FrameType]) -> tuple[str, str]:
    """Returns the library function that the innermost line of user code called, and that line.

    Args:
        frames: a stack, innermost frame first.

    Returns:
        `tuple`: the outermost of `COLLECTIVE_CALLS` among the functions that the line led to, otherwise the innermost
        function, and the line as `file.py:3`; an empty line if no user code is on the stack.
    """
    outer = next((index for index, frame in enumerate(frames) if not is_in_packages(frame, LIBRARIES)), len(frames))
    names = [frame.f_code.co_name.partition("[")[0] for frame in frames[:outer]]
    name = next((name for name in reversed(names) if name in COLLECTIVE_CALLS), names[0] if names else "")
    if outer == len(frames):
        return name, ""
    return name, f"{os.path.basename(frames[outer].f_code.co_filename)}:{frames[outer].f_lineno}"


def is_called_by_user(callees: tuple[str, ...]) -> bool:
    """Returns whether user code has called the caller's function, through functions of the packages `callees` only."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_in_packages(frame, callees):
        frame = frame.f_back
    return frame is not None and not is_in_packages(frame, LIBRARIES)

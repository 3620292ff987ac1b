"""Decisions that every rank follows if any rank takes them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def reduce_flags(flags: Sequence[bool]) -> list[bool]:
    """Returns for each flag whether any rank of the job has set it; one all-reduce, which every rank must call."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(flags)
    device = "cpu" if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    reduced = torch.tensor(list(map(int, flags)), device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return [bool(flag) for flag in reduced.tolist()]

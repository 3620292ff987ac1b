"""Collectives of the data parallel axis that run while backward goes on: reduce-scatter and all-gather of flat rows.

A tensor `[ranks, width]` holds one row per rank. gloo sends and receives at several times the speed of its own
collectives (two ranks on one machine, 32 MiB: gather 12 ms against 50, reduce-scatter 38 against 53 for an all-to-all),
so there every rank exchanges rows with every other one; other backends use the collective.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...compat.torch_distributed import all_gather_started, reduce_scatter_started


def is_pairwise(group: dist.ProcessGroup) -> bool:
    """Tells whether the ranks of a group send rows to each other one by one."""
    return dist.get_backend(group) == "gloo"


class ReduceScatter:
    """A started sum of `rows` `[ranks, width]` over the group, of which this rank keeps its own row.

    `rows` must stay as they are until `wait()` has returned the sum `[width]`, which lies in `recv_buffer`.

    Args:
        recv_buffer (`Tensor`): memory for what arrives: `[ranks - 1, width]` where rows are sent one by one, else
            `[1, width]`, which may be this rank's of `rows`.
    """

    def __init__(self, rows: Tensor, recv_buffer: Tensor, group: dist.ProcessGroup):
        self.rows, self.recv_buffer, self.rank = rows, recv_buffer, dist.get_rank(group)
        ranks = dist.get_world_size(group)
        self.pairwise = is_pairwise(group)
        self.works: list[Any] = []
        if not self.pairwise:
            self.works = [reduce_scatter_started(recv_buffer[0], rows.view(-1), group)]
            return
        for index, other in enumerate(other for other in range(ranks) if other != self.rank):
            self.works.append(dist.isend(rows[other], group=group, group_dst=other))
            self.works.append(dist.irecv(recv_buffer[index], group=group, group_src=other))

    def wait(self) -> Tensor:
        """Returns this rank's row of the sum, `[width]`."""
        for work in self.works:
            work.wait()
        total = self.recv_buffer[0]
        if self.pairwise:
            total += self.rows[self.rank]
            for row in self.recv_buffer[1:]:
                total += row
        return total


class AllGather:
    """A started exchange of each rank's row of `rows` `[ranks, width]`; `wait()` returns when all rows are there."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.works: list[Any] = []
        if ranks == 1:
            return
        if not is_pairwise(group):
            self.works = [all_gather_started(rows.view(-1), rows[rank], group)]
            return
        for other in range(ranks):
            if other != rank:
                self.works.append(dist.isend(rows[rank], group=group, group_dst=other))
                self.works.append(dist.irecv(rows[other], group=group, group_src=other))

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def gather_rows(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers every rank's `own` `[width]` as `[ranks, width]`."""
    rows = own.new_empty((dist.get_world_size(group), own.shape[0]))
    rows[dist.get_rank(group)] = own
    AllGather(rows, group).wait()
    return rows


def sum_over(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds up a tensor of any shape over the group in place."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor

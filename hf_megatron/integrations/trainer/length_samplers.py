"""Length-grouping samplers that work on global batches, across all data-parallel ranks.

The stock samplers are sized by devices or by all processes of the job, and assume that every process has its own
samples.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from ...parallel_state import ParallelState, parallel_state


def get_sampler(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the stock sampler, resized to the batches of all data-parallel ranks."""
    sampler = original(self, *args, **kwargs)
    state = None if self.model is None else parallel_state(self.model)
    if state is None:
        return sampler
    if type(sampler) is LengthGroupedSampler:
        return _grouped(sampler, state)
    return _rebalanced(sampler, self.args.world_size, state) if type(sampler) is BatchRebalanceSampler else sampler


class _OneOrder(LengthGroupedSampler):
    """A sampler that uses rank 0's order: ranks may have consumed different amounts of random numbers by now."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        dist.broadcast_object_list(order, src=0)
        return iter(order)


def _grouped(stock: LengthGroupedSampler, state: ParallelState) -> LengthGroupedSampler:
    # A sampler with its own generator draws the same order on all ranks.
    cls = _OneOrder if stock.generator is None else LengthGroupedSampler
    size = stock.batch_size * state.mesh.dp_size
    return cls(size, lengths=stock.lengths, generator=stock.generator)


def _rebalanced(stock: BatchRebalanceSampler, processes: int, state: ParallelState) -> BatchRebalanceSampler:
    dp_size = state.mesh.dp_size
    return BatchRebalanceSampler(
        stock.lengths,
        stock.effective_batch_size // max(1, processes) * dp_size,
        dp_size,
        stock.grad_accum,
        shuffle=stock.shuffle,
        seed=stock.seed,
        rank=state.mesh.dp_rank,
        drop_last=stock.drop_last,
    )

"""Length-grouping samplers that work on global batches, across all data-parallel ranks.

The stock sampler is sized by the batch of one process. `BatchRebalanceSampler` is sized by `world_size` and
`process_index`, which count replicas.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from transformers.trainer_pt_utils import LengthGroupedSampler

from ...parallel_state import ParallelState, parallel_state


def get_sampler(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the stock sampler; one that groups by length is resized to the batches of all data-parallel ranks."""
    sampler = original(self, *args, **kwargs)
    state = None if self.model is None else parallel_state(self.model)
    if state is None:
        return sampler
    return _grouped(sampler, state) if type(sampler) is LengthGroupedSampler else sampler


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

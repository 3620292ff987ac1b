"""Prepared schedulers: several steps at each optimizer step, as loops that Accelerate distributes expect.

Such loops count the steps of a schedule in batches before these are spread over the replicas, or multiply them by
`accelerator.num_processes`. Ranks that share a batch are one process there.
"""

from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import OneCycleLR


class SchedulerOfReplicas(AcceleratedScheduler):
    """A stock prepared scheduler that steps once for each of `replicas`, and once where batches are split."""

    def __init__(self, stock: AcceleratedScheduler, replicas: int):
        super().__init__(stock.scheduler, stock.optimizers, stock.step_with_optimizer, split_batches=True)
        self._is_accelerate_prepared = True
        self.steps = 1 if stock.split_batches or not stock.step_with_optimizer else replicas

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps where the optimizer has stepped."""
        for _ in range(self.steps if self.gradient_state.sync_gradients else 1):
            if isinstance(self.scheduler, OneCycleLR) and self.scheduler._step_count > self.scheduler.total_steps:
                return
            super().step(*args, **kwargs)

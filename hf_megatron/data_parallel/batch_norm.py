"""BatchNorm checks: batch statistics differ when a rank or microbatch sees only part of the batch."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..compat.shared import Shared
from ..config import MegatronConfig
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError
from ..parallel_state import ParallelState

_USE_ONE_BATCH = "Load the model with dp_size=1 and num_microbatches=1."
_USE_RUNNING_STATISTICS = (
    "Call module.eval() on every BatchNorm module after each model.train(), or once and set `module.train = lambda "
    "mode: module` for Trainer, which calls model.train() in every step, or load the model with dp_size=1 and "
    "num_microbatches=1."
)


def batch_norms(model: nn.Module) -> list[str]:
    """Returns the names of a model's BatchNorm modules, on all pipeline stages."""
    # Off-stage placeholders have the class of their module and follow `train()` and `eval()`, so all stages agree.
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def splits_batches(config: MegatronConfig, ranks_of_data: int) -> bool:
    """Returns whether modules see only part of a batch: one microbatch, or the samples of one rank.

    Args:
        ranks_of_data (`int`): number of data-parallel ranks.
    """
    return (config.pp_size > 1 and config.num_microbatches != 1) or ranks_of_data > 1


class BatchNormGuard(Shared):
    """Raises on all ranks in calls where a BatchNorm would use the statistics of part of the batch."""

    def __init__(self, model: nn.Module, state: ParallelState):
        self.names = batch_norms(model)
        self.splits_batch = splits_batches(state.config, state.axes.size("dp"))

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the check on the model's calls if it has BatchNorm modules and its batches are split."""
        if self.splits_batch and self.names:
            hooks.add("batch norm", self._enter)

    def _enter(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for name in self.names:
            norm: Any = model.get_submodule(name)
            # In evaluation mode a norm with running statistics reads nothing from the batch.
            if norm.training or not norm.track_running_stats:
                raise UnsupportedError(
                    f"{name} ({type(norm).__name__}) computes batch statistics, but data-parallel ranks and pipeline "
                    "microbatches see only part of the batch: results would differ from a single process. "
                    + (_USE_RUNNING_STATISTICS if norm.track_running_stats else _USE_ONE_BATCH)
                )

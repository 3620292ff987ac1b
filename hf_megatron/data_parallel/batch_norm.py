"""Norms by the statistics of a batch, which are other ones where ranks or microbatches see a part of it."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..compat.shared import Shared
from ..config import MegatronConfig
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError
from ..parallel_state import ParallelState


def batch_norms(model: nn.Module) -> list[str]:
    """Names the norms of a model that take the statistics of a batch, or would."""
    # What stands for modules of other stages is of their classes, and follows `train()` and `eval()` as they do.
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def splits_batches(config: MegatronConfig, ranks_of_data: int) -> bool:
    """Tells whether norms see parts of batches: microbatches, or rows of a rank.

    Args:
        ranks_of_data (`int`): ranks that see other rows.
    """
    return (config.pp_size > 1 and config.num_microbatches != 1) or ranks_of_data > 1


class BatchNormGuard(Shared):
    """Refuses calls in which a norm would take the statistics of a part of the batch, on all ranks alike."""

    def __init__(self, model: nn.Module, state: ParallelState):
        self.names = batch_norms(model)
        self.splits_batch = splits_batches(state.config, state.axes.size("dp"))

    def install(self, hooks: ForwardHooks) -> None:
        """Has each call of a model look at its norms, if there are any and parts of batches."""
        if self.splits_batch and self.names:
            hooks.add("batch norm", self._enter)

    def _enter(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        for name in self.names:
            norm: Any = model.get_submodule(name)
            if norm.training or not norm.track_running_stats:
                raise UnsupportedError(
                    f"{name} ({type(norm).__name__}) takes the statistics of a batch, of which dp ranks and "
                    "microbatches of a pipeline see parts: numbers would not be one process's. Put the part of the "
                    "model that holds it into evaluation mode behind model.train(), as in "
                    f"model.get_submodule({name.rpartition('.')[0]!r}).eval(), or load the model with dp_size=1 and "
                    "num_microbatches=1."
                )

"""Head and loss of models whose forward is Liger's, which would read the full weight of the head."""

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from ..compat.fused_kernels import SKIP_LOGITS, is_liger_head
from ..compat.shared import Shared
from ..compat.torch_autograd import leave_uncompiled
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError

# Key of a model's `LigerHead` in `ParallelState.placed`.
LIGER_HEAD = "liger head"


class LigerHead(Shared):
    """Makes Liger's forward of a model compute the logits by the model's head, and the loss by its `loss_function`."""

    def __init__(self, *, pipelined: bool):
        self.pipelined = pipelined
        self.is_announced = False

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the change of the call's arguments."""
        hooks.add(LIGER_HEAD, self._enter)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        is_set_on_model = is_liger_head(vars(model).get("forward"))
        if is_set_on_model and self.pipelined:
            raise UnsupportedError(
                f"{type(model).__name__}.forward was replaced by Liger's, which calls layers of other stages. Apply "
                "Liger before the model is loaded, or with fused_linear_cross_entropy=False."
            )
        if is_set_on_model or is_liger_head(type(model).forward):
            self.announce()
            return args, kwargs | {SKIP_LOGITS: False}
        if SKIP_LOGITS in kwargs:
            # Trainer passes it in evaluation with `use_liger_kernel=True`, also to forwards that do not take it.
            return args, {name: value for name, value in kwargs.items() if name != SKIP_LOGITS}
        return None

    def announce(self, losses: tuple[str, ...] = ("fused_linear_cross_entropy",)) -> None:
        """Prints once, on the first rank, what computes the loss."""
        if self.is_announced:
            return
        self.is_announced = True
        if dist.get_rank() == 0 and dist.get_backend() != "fake":
            print(
                f"hf_megatron: Liger's {' and '.join(losses)} is not used: the model's own head and loss compute the "
                "same (MegatronConfig.loss_chunk_size bounds their memory).",
                file=sys.stderr,
                flush=True,
            )

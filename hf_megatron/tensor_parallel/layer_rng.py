"""Choice of the RNG state, shared or local to a rank, at each point of a forward.

| point in the forward | RNG state |
|---|---|
| before, between and after layers | shared |
| inside a layer | shared; with a sharded sequence local |
| inside a block on the full sequence, and before its column-parallel linears | shared |
| after a column-parallel linear, until the partial sums are reduced | local |
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.shared import Shared
from ..core.communication.rng import TensorParallelRng, broadcast_state
from ..core.forward_hooks import ForwardHooks


class SyncedRngState(Shared):
    """Starts every training forward from the same RNG state on all ranks, whatever seeds the user set.

    Args:
        before (`Callable`, *optional*): called first.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, before: Callable[[], None] | None = None):
        self.device, self.group, self.before = device, group, before

    def install(self, hooks: ForwardHooks) -> None:
        """Registers the broadcast in a model's table of hooks."""
        hooks.add("rng", self._enter)

    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model.training or torch.is_grad_enabled():
            if self.before is not None:
                self.before()
            broadcast_state(self.device, self.group, of_host=True)


@functools.cache
def _on_own_stream(base: Any) -> type[nn.Module]:
    @functools.wraps(base.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # Each rank has other tokens here: equal draws would repeat one dropout mask in every shard of the sequence.
        if not layer.training:
            return base.forward(layer, *args, **kwargs)
        layer._random_streams.use_local_rng()
        output = base.forward(layer, *args, **kwargs)
        layer._random_streams.use_shared_rng()
        return output

    return type(base.__name__, (base,), {"forward": forward})


def draw_alone(layer: nn.Module, rng: TensorParallelRng) -> None:
    """Switches to the local RNG state inside a layer of a sharded sequence.

    A subclass rather than hooks: transformers recomputes `forward`, which has to switch the state again.
    """
    object.__setattr__(layer, "_random_streams", rng)
    layer.__class__ = _on_own_stream(type(layer))  # type: ignore[arg-type]

"""Dynamic RoPE scaling ("dynamic", "longrope") by the longest sequence of the global batch.

transformers rescales rotary embeddings by the largest position that it sees; a data-parallel rank or a microbatch sees
only part of the batch. The largest position of the batch is appended to the positions as an additional column, and the
angles of this column are removed again.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shard_safe import shard_safe
from ..compat.shared import Shared
from ..parallel_state import ParallelState
from .packed_sequences import POSITIONS

_BY_LENGTH = ("dynamic", "longrope")
_INPUTS = ("input_ids", "inputs_embeds")
_TOKENS = -2


def scales_by_length(config: Any) -> bool:
    """Returns whether a model's rotary embeddings depend on the longest sequence of a batch."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return any(kind.get("rope_type") in _BY_LENGTH for kind in kinds)


class DynamicRopeSync(Shared):
    """Computes the largest position of each batch and passes it to the model's rotary embeddings.

    Attributes:
        largest: scalar, the largest position of the current call; `None` if positions are left unchanged.
    """

    def __init__(self, model: Any, state: ParallelState):
        self.state = state
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]
        self.largest: Tensor | None = None

    def install(self, model: Any) -> None:
        """Registers the hooks if the model scales RoPE by length and its batches are split over ranks or stages."""
        in_parts = max(self.state.axes.size("dp"), self.state.axes.size("pp")) > 1
        if not in_parts or not scales_by_length(model.config):
            return
        self.state.hooks.add("dynamic rope", self._begin, self._end, always_exit=True)
        for module in model.modules():
            if POSITIONS in inspect.signature(type(module).forward).parameters and "rope_type" in vars(module):
                module.register_forward_pre_hook(self._enter, with_kwargs=True)
                module.register_forward_hook(self._leave)

    @shard_safe
    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        positions, inputs = (
            arguments.get(POSITIONS),
            next((arguments[n] for n in _INPUTS if arguments.get(n) is not None), None),
        )
        self.largest = None if positions is None else positions.max()
        is_of_batch = arguments.get("labels") is not None or (model.training and torch.is_grad_enabled())
        if inputs is None or not (is_of_batch and self.state.loss.over_ranks):
            return
        # Collective over dp: only in calls that every rank makes, because the loss is averaged over the ranks too.
        if self.largest is None:
            # Without positions the model counts them itself: 0 to sequence length - 1.
            self.largest = torch.full((), inputs.shape[1] - 1, device=inputs.device)
        self.largest = self.largest.to(self.state.mesh.device, torch.int64, copy=True)
        dist.all_reduce(self.largest, dist.ReduceOp.MAX, group=self.state.mesh.group("dp"))

    @shard_safe
    def _end(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.largest = None

    @shard_safe
    def _enter(self, rotary: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.largest is None:
            return None
        names = list(inspect.signature(type(rotary).forward).parameters)[1:]
        bound = dict(zip(names, args, strict=False)) | kwargs
        positions = bound[POSITIONS]
        # [batch, tokens] -> [batch, tokens + 1], or [1, tokens + 1].
        column = self.largest.to(positions).expand(*positions.shape[:-1], 1)
        return (), bound | {POSITIONS: torch.cat([positions, column], -1)}

    @shard_safe
    def _leave(self, rotary: nn.Module, args: tuple, output: Any) -> Any:
        if self.largest is None:
            return None
        # cos and sin: [batch, tokens + 1, head_dim] -> [batch, tokens, head_dim].
        return tuple(angles.narrow(_TOKENS, 0, angles.shape[_TOKENS] - 1) for angles in output)

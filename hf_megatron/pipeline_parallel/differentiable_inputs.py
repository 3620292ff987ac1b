"""Differentiable inputs of a pipelined model, such as soft prompts or embeddings that were computed from parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import ModelOutput

from ..core.off_stage import OffStageTensor
from ..errors import UnsupportedError


class TrainedInputs:
    """Input tensors of a call that require gradients, detached from their graph.

    Args:
        arguments (`Mapping`): arguments of the call.
        ranks (`ProcessGroup`): the pipeline's ranks, with a backend for host tensors.

    Attributes:
        arguments: the arguments, with new leaves instead of the tensors that require gradients.
        tensors: the original tensors, of any shape.
    """

    def __init__(self, arguments: Mapping[str, Any], ranks: dist.ProcessGroup):
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self._leaves: list[Tensor] = []
        embeddings = arguments.get("inputs_embeds")
        self._trains_embeddings = False
        if torch.is_grad_enabled() and isinstance(embeddings, Tensor):
            # Only the first stage knows whether the output of the model's embedding requires a gradient.
            trained = torch.tensor(embeddings.requires_grad, dtype=torch.int32)
            dist.all_reduce(trained, dist.ReduceOp.MAX, group=ranks)
            self._trains_embeddings = bool(trained)
        self.arguments = {name: _map(value, partial(self._cut, name)) for name, value in arguments.items()}

    def _cut(self, name: str, tensor: Tensor) -> Tensor:
        values = tensor
        if isinstance(tensor, OffStageTensor):
            # Only the first stage reads embeddings: zeros of the same shape are enough elsewhere.
            values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        trained = tensor.requires_grad or (name == "inputs_embeds" and self._trains_embeddings)
        if not torch.is_grad_enabled() or not trained:
            return values
        # The pipeline's backwards end at this leaf; `collect` returns its gradient to the caller's graph.
        leaf = values.detach().requires_grad_()
        self.tensors.append(tensor)
        self.names.append(name)
        self._leaves.append(leaf)
        return leaf

    def require_first_stage(self, schedule: str) -> None:
        """Raises `UnsupportedError` for trained inputs of later stages, whose gradients a split backward leaves out."""
        for name in self.names:
            if name != "inputs_embeds":
                raise UnsupportedError(
                    f"{name} requires a gradient: pipeline_schedule = {schedule!r} splits the backward and computes "
                    "input gradients of inputs_embeds only. Use '1f1b' or 'interleaved_1f1b'."
                )

    def collect(self, group: dist.ProcessGroup) -> list[Tensor]:
        """Returns the gradients in the shapes of `tensors`, summed over the stages; collective."""
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            leaf.grad = None
            # Each stage has the gradient of its own use of the input.
            dist.all_reduce(gradient, group=group)
        return gradients


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _map(item, function) for name, item in value.items()})
    if type(value) is dict:
        return {name: _map(item, function) for name, item in value.items()}
    return value

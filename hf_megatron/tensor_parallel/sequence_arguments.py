"""Further arguments of layers whose sequence is split, with an entry for each token."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..communication.collectives import split_over_ranks
from ..patch_ledger import Shared


class SequenceArguments(Shared):
    """Splits further arguments of a layer, one entry per token each, along the sequence like its hidden states.

    Args:
        dims (`Mapping[str, int]`): name -> the dim of the tokens.
    """

    def __init__(self, dims: Mapping[str, int], group: dist.ProcessGroup):
        self.dims = dims
        self.group = group

    def install(self, layers: Iterable[nn.Module]) -> None:
        for layer in layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]):
        positions = {name: index for index, name in enumerate(inspect.signature(layer.forward).parameters)}
        positional, named = list(args), dict(kwargs)
        for name, dim in self.dims.items():
            if name in named:
                named[name] = self._split(named[name], dim)
            elif positions[name] < len(positional):
                positional[positions[name]] = self._split(positional[positions[name]], dim)
        return tuple(positional), named

    def _split(self, value: Tensor | None, dim: int) -> Tensor | None:
        return None if value is None else split_over_ranks(value, dim, self.group)

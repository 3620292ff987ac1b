"""Per-token arguments of a module other than its hidden states."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.communication.collectives import split_over_ranks
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError


def replace_arguments(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], changes: Mapping[str, Callable[[Tensor], Tensor]]
) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of a module's call, of any shape, with some of those that are present replaced.

    Args:
        changes (`Mapping[str, Callable]`): name -> function of the old value.
    """
    # Arguments may be positional or named; absent ones stay absent.
    places = {name: index for index, name in enumerate(inspect.signature(module.forward).parameters)}
    positional, named = list(args), dict(kwargs)
    for name, change in changes.items():
        if named.get(name) is not None:
            named[name] = change(named[name])
        elif name not in named and places[name] < len(positional) and positional[places[name]] is not None:
            positional[places[name]] = change(positional[places[name]])
    return tuple(positional), named


class SequenceArguments(Shared):
    """Splits further per-token arguments of a layer along the sequence, like its hidden states.

    Args:
        dims (`Mapping[str, int]`): name -> its sequence dim.
        refused (`Mapping[str, str]`): arguments with which a layer cannot be called -> why.
    """

    def __init__(self, dims: Mapping[str, int], group: dist.ProcessGroup, refused: Mapping[str, str]):
        self.dims, self.refused = dims, refused
        self.group = group

    def install(self, layers: Iterable[nn.Module], hooks: ForwardHooks) -> None:
        for layer in layers:
            hooks.add_to(layer, "per-token arguments", self._enter)

    def _enter(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]):
        # [..., sequence, ...] -> [..., sequence / tp, ...], matching the layer's shard of the hidden states.
        splits = {
            name: functools.partial(split_over_ranks, dim=dim, group=self.group) for name, dim in self.dims.items()
        }
        rejections = {name: functools.partial(self._reject, name) for name in self.refused}
        return replace_arguments(layer, args, kwargs, {**rejections, **splits})

    def _reject(self, name: str, value: Tensor) -> Tensor:
        raise UnsupportedError(f"{self.refused[name]} Load the model with sequence_parallel=False.")

"""Where a row is cut: before the first layer, and joined again behind the last one.

    ids -> embeddings, positions, masks   whole on every rank
    first layer                           each rank takes its tokens
    layers                                on these; attention sees all of them
    last layer                            tokens are joined: norm, head and loss are whole again
    outputs                               each rank counts its share of their gradient

Every rank computes what lies around the layers as one process does, and hands a share of the gradient of each output to
its backward: what the ranks' parameters get adds up to one process's gradient, in the layers and around them.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..communication.collectives import copy_to_ranks
from ..patch_ledger import LEDGER, Shared
from .attention import ContextGroups, SharedRow
from .descriptions import ContextMask
from .exchange import gather_tokens, take_tokens

_TOKENS = 1


class _Share(torch.autograd.Function):
    """Identity; each of `ranks` that computed the same hands on its share of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes the tensors in what a layer gets or a model returns."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, ModelOutput):
        for name, item in value.items():
            value[name] = _mapped(item, change)
    return value


class ContextStack(Shared):
    """A stack of layers whose tokens lie on several ranks.

    Args:
        groups: the ranks.
        arguments: of a layer, by name, that have an entry for each token in their second dim.
    """

    def __init__(self, groups: ContextGroups, ranks: int, group: Any, arguments: frozenset[str]):
        self.groups, self.ranks, self.group, self.arguments = groups, ranks, group, arguments
        self.row: SharedRow | None = None
        self._depth = 0

    def install(self, model: nn.Module, layers: nn.ModuleList) -> None:
        """Puts hooks around a model, its base and its layers; theirs are the outermost."""
        for index, layer in enumerate(layers):
            names = tuple(inspect.signature(layer.forward).parameters)
            enter = functools.partial(self._enter, names, index == 0)
            layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        layers[-1].register_forward_hook(self._leave)
        base: Any = model.base_model
        for module in (model,) if base is model else (model, base):
            module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._end, always_call=True)

    def row_of(self, length: int) -> SharedRow:
        """Returns where the tokens of the row under way lie."""
        if self.row is None or self.row.length != length:
            self.row = SharedRow(self.groups, length)
        return self.row

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._depth += 1
        if self._depth > 1:
            return args, kwargs
        self.row = None
        LEDGER.context = self

        def summed(tensor: Tensor) -> Tensor:
            return copy_to_ranks(tensor, self.group) if tensor.requires_grad else tensor

        return _mapped(args, summed), _mapped(kwargs, summed)

    def _end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        self._depth -= 1
        if self._depth:
            return output
        LEDGER.context = None

        def share(tensor: Tensor) -> Tensor:
            return _Share.apply(tensor, self.ranks) if tensor.requires_grad else tensor

        return _mapped(output, share)

    def _enter(
        self, names: tuple[str, ...], is_first: bool, layer: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        masks = [value for value in given.values() if isinstance(value, ContextMask)]
        hidden = args[0] if args else kwargs["hidden_states"]
        row = masks[0].row if masks else self.row_of(hidden.shape[_TOKENS]) if is_first else self.row
        assert row is not None

        def own(name: str, value: Any) -> Any:
            if name == names[0]:
                return take_tokens(value, _TOKENS, row.order, self.groups.rank) if is_first else value
            if name in self.arguments:
                return _mapped(value, row.own)
            return value

        args = tuple(own(name, value) for name, value in zip(names, args, strict=False))
        return args, {name: own(name, value) for name, value in kwargs.items()}

    def _leave(self, layer: nn.Module, args: tuple, output: Any) -> Any:
        row = self.row
        assert row is not None
        if isinstance(output, Tensor):
            return gather_tokens(output, _TOKENS, row.order, self.group)
        return (gather_tokens(output[0], _TOKENS, row.order, self.group), *output[1:])

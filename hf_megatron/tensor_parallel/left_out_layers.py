"""Layers that a loop leaves out at random in training, also the first and the last of a split sequence.

These two split and join the sequence, so the loop is told to call them even when it has drawn that they are left out.
They then do nothing but that.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..patch_ledger import Shared
from .region import HIDDEN_STATES, SequenceStack

_RATE = "layerdrop"
_RATES_OF_CONFIGS = (_RATE, "encoder_layerdrop", "decoder_layerdrop")


def require_own_rates(model: nn.Module, stacks: Iterable[str]) -> None:
    """Raises `UnsupportedError` for a loop over the layers of a stack that reads its rate elsewhere than on itself."""
    for stack in stacks:
        loop = _loop_over(model, stack)
        config = getattr(loop, "config", None)
        if _RATE not in vars(loop) and any(getattr(config, name, 0) for name in _RATES_OF_CONFIGS):
            raise UnsupportedError(
                f"{stack} leaves out layers at random by a rate of its config, the first and the last of which split "
                "and join the sequence. Set the layerdrop of the config to 0.0, or sequence_parallel=False."
            )


def leave_out_layers(model: nn.Module, name: str, stack: SequenceStack) -> None:
    """Lets the loop over a stack's layers leave out its first and its last one too, where it has a rate to."""
    if _RATE in vars(_loop_over(model, name)):
        LeftOutLayers(stack).install(_loop_over(model, name), list(model.get_submodule(name).children()))


def _loop_over(model: nn.Module, stack: str) -> nn.Module:
    return model.get_submodule(stack.rpartition(".")[0])


class _Rate:
    """Stands for a loop's rate while it runs: it compares the rate with zero, and what it drew for a layer with it."""

    def __init__(self, rate: float, layers: "LeftOutLayers"):
        self.rate, self.layers = rate, layers

    def __gt__(self, other: Any) -> bool:
        return self.layers.leaves_out(bool(other < self.rate)) if isinstance(other, Tensor) else self.rate > other

    def __ge__(self, other: Any) -> bool:
        return self.layers.leaves_out(bool(other <= self.rate)) if isinstance(other, Tensor) else self.rate >= other


class LeftOutLayers(Shared):
    """What a loop has drawn for the layers of one stack.

    Attributes:
        asked: for how many layers of this forward the loop has drawn.
        is_next: whether the layer that is called next was to be left out.
        values: how many values a layer returns, 0 for hidden states alone; `None` before one has run.
    """

    def __init__(self, stack: SequenceStack):
        self.stack, self.last = stack, 0
        self.asked, self.is_next = 0, False
        self.values: int | None = None

    def install(self, loop: nn.Module, layers: list[nn.Module]) -> None:
        self.last = len(layers) - 1
        loop.register_forward_pre_hook(self._enter)
        loop.register_forward_hook(self._leave, always_call=True)
        for layer in {id(layer): layer for layer in (layers[0], layers[-1])}.values():
            object.__setattr__(layer, "_left_out_layers", self)
            layer.__class__ = _may_be_left_out(type(layer))  # type: ignore[arg-type]

    def _enter(self, loop: Any, args: tuple) -> None:
        self.asked, self.is_next = 0, False
        if loop.training and loop.layerdrop > 0:
            loop.layerdrop = _Rate(loop.layerdrop, self)

    def _leave(self, loop: Any, args: tuple, output: Any) -> None:
        if isinstance(loop.layerdrop, _Rate):
            loop.layerdrop = loop.layerdrop.rate

    def leaves_out(self, drawn: bool) -> bool:
        """Answers the loop's question for its next layer: those at the ends are called, whatever was drawn."""
        place, self.asked = self.asked, self.asked + 1
        if place not in (0, self.last):
            return drawn
        self.is_next = drawn
        return False

    def passed_by(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns what a layer at an end returns that is left out: the hidden states it was called with."""
        states = args[0] if args else kwargs[HIDDEN_STATES]
        if self.asked == 1:
            states = self.stack.split(states)
        if self.asked == self.last + 1:
            states = self.stack.join(states)
        return states if not self.values else (states, *[None] * (self.values - 1))


@functools.cache
def _may_be_left_out(base: Any) -> type[nn.Module]:
    # Its hooks would not run either.
    def __call__(layer: Any, *args: Any, **kwargs: Any) -> Any:
        layers: LeftOutLayers = layer._left_out_layers
        is_left_out, layers.is_next = layers.is_next, False
        if is_left_out and layers.values is not None:
            return layers.passed_by(args, kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_left_out):
            output = base.__call__(layer, *args, **kwargs)
        layers.values = 0 if isinstance(output, Tensor) else len(output)
        return layers.passed_by(args, kwargs) if is_left_out else output

    return type(base.__name__, (base,), {"__call__": __call__})

"""Shared experts, which see every token, computed while the rows of the routed experts are in flight.

Blocks call routed and shared experts one after the other, with the same hidden states. The block's first forward shows
which ones the shared experts take; later forwards call them while rows are in flight, and the block's own call returns
that result.
"""

import copy
from typing import Any

from torch import Tensor, nn

from ..compat.instance_patches import mix_into
from ..compat.torch_autograd import leave_uncompiled

_NAME = "shared"


class EarlyCall:
    """Mixin of shared experts that are called while rows are in flight."""

    early: "SharedExperts"

    @leave_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The block's own call: return the result that was computed early.
        if len(args) == 1 and not kwargs and self.early.has_made(args[0]):
            return self.early.take()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class SharedExperts:
    """Shared experts of a block; a deep copy of the block has its own.

    Attributes:
        takes (*optional*): `"block"` or `"experts"`, the module with whose input they are called; `None` if unknown.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.takes: str | None = None
        self._given: dict[str, Tensor] = {}
        self._made: tuple[Tensor, Any] | None = None
        self._is_early = False

    def __deepcopy__(self, memo: dict) -> "SharedExperts":
        duplicate = memo[id(self)] = SharedExperts(self.module)
        duplicate.takes = self.takes
        duplicate.module = copy.deepcopy(self.module, memo)
        return duplicate

    def enter(self, hidden: Any) -> None:
        """Begins a forward of the block, with its hidden states."""
        self._given, self._made = ({"block": hidden} if isinstance(hidden, Tensor) else {}), None

    def leave(self) -> None:
        """Ends a forward of the block."""
        self._given, self._made = {}, None

    def compute(self, experts_input: Tensor, takes: str | None) -> None:
        """Computes the shared experts before the block calls them, while the rows of its experts are in flight.

        Args:
            experts_input: the input of the routed experts.
            takes (*optional*): see `self.takes`; for a recomputed forward, its value in the first forward.
        """
        self._given["experts"] = experts_input
        if takes is None or takes not in self._given:
            return
        # [..., width]: the shared experts overlap with the all-to-all.
        hidden = self._given[takes]
        self._is_early = True
        try:
            self._made = hidden, self.module(hidden)
        finally:
            self._is_early = False

    def has_made(self, hidden: Any) -> bool:
        """Returns whether the output for these hidden states exists; records which hidden states are used."""
        if self._is_early or "experts" not in self._given:
            return False
        # Blocks pass the same tensor to both experts, or a view of it to one of them.
        self.takes = next((kind for kind, tensor in self._given.items() if tensor is hidden), None)
        return self._made is not None and self._made[0] is hidden

    def take(self) -> Any:
        """Returns the output, once."""
        assert self._made is not None
        (_, output), self._made = self._made, None
        return output


def find_shared_experts(block: nn.Module) -> SharedExperts | None:
    """Sets up the shared experts of a block to be called early, if the block has exactly one module of them."""
    children = [child for name, child in block.named_children() if _NAME in name and _is_expert(child)]
    if len(children) != 1:
        return None
    shared = SharedExperts(children[0])
    mix_into(children[0], EarlyCall, early=shared)
    return shared


def _is_expert(module: nn.Module) -> bool:
    """Returns whether a module is an expert, as opposed to a gate, which is a single linear."""
    return next(module.children(), None) is not None

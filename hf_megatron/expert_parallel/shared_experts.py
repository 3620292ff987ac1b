"""Shared experts, which see every token, computed while the rows of the others travel.

Blocks call their experts one after the other, with the same hidden states. Which ones the shared experts take is seen
in the block's first forward; from the next on they are called while rows are on their way, and the block's own call
is answered with what they made.
"""

import copy
from typing import Any

from torch import Tensor, nn

from ..compat.instance_patches import mix_into
from ..compat.torch_autograd import leave_uncompiled

_NAME = "shared"


class EarlyCall:
    """Mixin of shared experts that are called while rows travel."""

    early: "SharedExperts"

    @leave_uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and self.early.has_made(args[0]):
            return self.early.take()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class SharedExperts:
    """The shared experts of a block; a deep copy of the block has those of the copy.

    Attributes:
        takes (*optional*): `"block"` or `"experts"`: whose hidden states they are called with behind the experts.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.takes: str | None = None
        self._given: dict[str, Tensor] = {}
        self._made: tuple[Tensor, Any] | None = None
        self._is_early = False

    def __deepcopy__(self, memo: dict) -> "SharedExperts":
        tiny_model = memo[id(self)] = SharedExperts(self.module)
        tiny_model.takes = self.takes
        tiny_model.module = copy.deepcopy(self.module, memo)
        return tiny_model

    def enter(self, hidden: Any) -> None:
        """Begins a forward of the block, with its hidden states."""
        self._given, self._made = ({"block": hidden} if isinstance(hidden, Tensor) else {}), None

    def leave(self) -> None:
        """Ends a forward of the block."""
        self._given, self._made = {}, None

    def compute(self, experts_input: Tensor, takes: str | None) -> None:
        """Computes what the block is going to ask for, while the rows of its experts travel.

        Args:
            experts_input: what the block has called its experts with.
            takes (*optional*): see `self.takes`; of a forward that is computed again, as it was then.
        """
        self._given["experts"] = experts_input
        if takes is None or takes not in self._given:
            return
        hidden = self._given[takes]
        self._is_early = True
        try:
            self._made = hidden, self.module(hidden)
        finally:
            self._is_early = False

    def has_made(self, hidden: Any) -> bool:
        """Tells whether the output for these hidden states is there; notes what is asked for."""
        if self._is_early or "experts" not in self._given:
            return False
        # Blocks hand the same tensor to both, or a view of it to one of them.
        self.takes = next((kind for kind, given in self._given.items() if given is hidden), None)
        return self._made is not None and self._made[0] is hidden

    def take(self) -> Any:
        """Hands the output out, once."""
        assert self._made is not None
        (_, output), self._made = self._made, None
        return output


def find_shared_experts(block: nn.Module) -> SharedExperts | None:
    """Has the shared experts of a block be called early, if it has some and it has them alone."""
    found = [child for name, child in block.named_children() if _NAME in name and _is_expert(child)]
    if len(found) != 1:
        return None
    shared = SharedExperts(found[0])
    mix_into(found[0], EarlyCall, early=shared)
    return shared


def _is_expert(module: nn.Module) -> bool:
    """Tells experts from gates, which are single linears."""
    return next(module.children(), None) is not None

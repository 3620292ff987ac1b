"""Cache of router choices for layers that backward recomputes: they neither route nor exchange sizes again.

A recomputed layer is called with the same tensor object as in its first forward, by which its tape is found. Routers
choose by `topk`: it returns the indices on the tape with the values of the recomputed scores, so that gradients take
the same way. Near-ties that a device rounds differently the second time change nothing.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..compat.shard_safe import shard_safe
from ..compat.torch_autograd import in_backward
from .shared_experts import SharedExperts
from .token_dispatcher import Route

TOPK = (torch.topk, Tensor.topk)


@dataclass
class Tape:
    """Choices of one forward of a layer, in order.

    Attributes:
        chosen: indices of each `topk`.
        routes: the routes of each MoE block's rows.
        shared_take (*optional*): what the shared experts were called early with.
    """

    chosen: list[Tensor] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    shared_take: str | None = None


class _Choices(TorchFunctionMode):
    """Base class: returns the values of the current scores at given indices from `topk`."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        indices = self.indices(functools.partial(func, *args, **kwargs))
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        # The same graph in both forwards: checkpoints compare the saved tensors.
        scores = args[0] if args else kwargs["input"]
        return torch.return_types.topk((scores.gather(dim, indices), indices))

    def indices(self, choose: Callable[[], Any]) -> Tensor:
        """Returns the indices of one call."""
        raise NotImplementedError


class Recorder(_Choices):
    """Records the choices of routers on a tape while it is entered."""

    def indices(self, choose: Callable[[], Any]) -> Tensor:
        with torch.no_grad():
            self.tape.chosen.append(choose()[1])
        return self.tape.chosen[-1]


class Player(_Choices):
    """Replays the choices on a tape to routers while it is entered."""

    def __init__(self, tape: Tape):
        super().__init__(tape)
        self.played = 0

    def indices(self, choose: Callable[[], Any]) -> Tensor:
        self.played += 1
        return self.tape.chosen[self.played - 1]


class LayerTapes:
    """Tapes of one layer's forwards that backward may recompute; a deep copy of the layer starts without any.

    Attributes:
        known (*optional*): tape of the forward that is being recomputed.
        written (*optional*): tape of the current forward.
    """

    def __init__(self) -> None:
        self.by_input: Any = WeakIdKeyDictionary()
        self.known: Tape | None = None
        self.written: Tape | None = None
        self._routes = 0

    def __deepcopy__(self, memo: dict) -> "LayerTapes":
        duplicate = memo[id(self)] = LayerTapes()
        return duplicate

    def enter(self, hidden: Tensor, *, is_kept: bool) -> None:
        """Begins a forward of the layer, with an input of any shape."""
        # By identity of the input, held weakly: a tape is freed with its forward's input.
        self.known = self.by_input.get(hidden) if in_backward() else None
        self.written, self._routes = None, 0
        if is_kept and self.known is None:
            self.written = self.by_input[hidden] = Tape()

    def leave(self) -> None:
        self.known = self.written = None

    def around_router(self) -> AbstractContextManager:
        """Returns the context in which a MoE block routes its tokens."""
        if self.known is not None:
            return Player(self.known)
        return nullcontext() if self.written is None else Recorder(self.written)

    def route(self) -> Route | None:
        """Returns the recorded route of the next MoE block, if the layer is recomputed."""
        if self.known is None or self._routes >= len(self.known.routes):
            return None
        self._routes += 1
        return self.known.routes[self._routes - 1]

    def shared_take(self, now: str | None) -> str | None:
        """Returns what shared experts are called early with; a recomputed forward repeats its first choice."""
        if self.known is not None:
            return self.known.shared_take
        if self.written is not None:
            self.written.shared_take = now
        return now

    def note(self, route: Route) -> None:
        """Records the route of a MoE block."""
        if self.written is not None:
            self.written.routes.append(route)


# Subclasses with a forward, not mixins or hooks: transformers wraps and recomputes the forward of each subclass of a
# layer.


@functools.cache
def _taped_layer(base: Any) -> type[nn.Module]:
    @shard_safe
    @functools.wraps(base.forward)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            return base.forward(layer, *args, **kwargs)
        # Only layers that backward recomputes need a tape.
        is_kept = getattr(layer, "gradient_checkpointing", False) and layer.training and torch.is_grad_enabled()
        layer._tapes_of_layer.enter(hidden, is_kept=is_kept)
        try:
            return base.forward(layer, *args, **kwargs)
        finally:
            layer._tapes_of_layer.leave()

    return type(base.__name__, (base,), {"forward": forward})


@functools.cache
def _taped_moe_block(base: Any) -> type[nn.Module]:
    @shard_safe
    @functools.wraps(base.forward)
    def forward(moe_block: Any, *args: Any, **kwargs: Any) -> Any:
        shared = moe_block._shared_experts
        if shared is not None:
            shared.enter(args[0] if args else kwargs.get("hidden_states"))
        try:
            # `topk` inside the block records to, or replays from, the layer's tape.
            with moe_block._moe_block_tapes.around_router():
                return base.forward(moe_block, *args, **kwargs)
        finally:
            if shared is not None:
                shared.leave()

    return type(base.__name__, (base,), {"forward": forward})


def is_taped(layer: nn.Module) -> bool:
    """Returns whether a layer records the choices of its routers."""
    return "_tapes_of_layer" in vars(layer)


def install_tapes(layer: nn.Module, moe_block: nn.Module, shared: SharedExperts | None = None) -> LayerTapes:
    """Installs tapes on a layer for the router of its MoE block, which may be the layer itself.

    Shared experts that are called early are notified of the beginning and end of the block's forwards.
    """
    tapes = LayerTapes()
    object.__setattr__(moe_block, "_shared_experts", shared)
    object.__setattr__(moe_block, "_moe_block_tapes", tapes)
    moe_block.__class__ = _taped_moe_block(type(moe_block))  # type: ignore[arg-type]
    object.__setattr__(layer, "_tapes_of_layer", tapes)
    layer.__class__ = _taped_layer(type(layer))  # type: ignore[arg-type]
    return tapes

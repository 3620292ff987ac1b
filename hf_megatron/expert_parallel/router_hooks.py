"""Hooks on a model's routers that observe or replace their choices, with the tokens that each router sees."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..compat.shard_safe import shard_safe
from ..compat.torch_autograd import in_backward, leave_uncompiled
from ..core.communication.collectives import bounds
from ..core.runtime import RUNTIME
from ..errors import ConfigError, UnsupportedError
from ..models.experts import find_experts, find_identity_experts
from ..models.spec import ModelSpec
from ..parallel_state import parallel_state
from .routing_cache import TOPK

_INPUTS = ("input_ids", "inputs_embeds")


@dataclass
class RoutedCall:
    """One call of the model: its size, and the routing of all of its tokens `[layers, batch * tokens, choices]`."""

    batch: int
    tokens: int
    routing: Tensor | None = None
    seen: set[str] = field(default_factory=set)


class Routers:
    """Blocks of a model that have routers, and the tokens that a rank sees in them."""

    def __init__(self, model: Any, spec: ModelSpec):
        self.model, self.state = model, parallel_state(model)
        # Local layers have the experts of all ep ranks.
        self.experts = find_experts(model, spec)
        if self.state is not None and (plan := self.state.placed.get("ep")) is not None:
            self.experts = {name: plan.experts[name] for name in self.experts}
        for name, more in find_identity_experts(model, spec, self.experts).items():
            self.experts[name] += more
        self.layers = self._of_all_stages(tuple(self.experts))
        if not self.layers:
            raise ConfigError(f"record_routing, replay_routing: {type(model).__name__} has no MoE layers.")
        plan = None if self.state is None else self.state.placed.get("tp")
        self._split = frozenset() if plan is None else plan.sequence_sharded_moe

    def _of_all_stages(self, local_names: tuple[str, ...]) -> tuple[str, ...]:
        if self.state is None or self.state.mesh.pp_size == 1:
            return local_names
        stages: list[Any] = [None] * self.state.mesh.pp_size
        dist.all_gather_object(stages, local_names, group=self.state.mesh.host_group("pp"))
        return tuple(name for stage in stages for name in stage)

    def tokens(self, name: str, call: RoutedCall) -> tuple[Tensor, int]:
        """Returns the tokens of a sequence, `[local]`, that a layer sees on this rank, and the sequence's length."""
        state = self.state
        # Full sequence, or the microbatch's; split over cp, then over tp with a sharded sequence.
        length = call.tokens if state is None or state.call.span is None else state.call.span.tokens
        # Positions in the sequence, narrowed down to this rank's below.
        held = torch.arange(length)
        context = RUNTIME.context
        if context is not None and context.has_parts:
            held = context.token_layout.order.tokens(context.groups.rank)
        if name.rpartition(".")[0] in self._split:
            assert state is not None
            start, stop = bounds(len(held), state.mesh.tp_size, dist.get_rank(state.mesh.tp_group))
            held = held[start:stop]
        return held, length

    def places(self, name: str, call: RoutedCall, count: int) -> Tensor | None:
        """Returns the indices of a layer's tokens, `[count]`, among the flattened tokens of the call's batch.

        `None` for a padding microbatch, which repeats another one. Raises `UnsupportedError` if `count` does not fit.
        """
        part = None if self.state is None else self.state.call.span
        if part is not None and part.is_repeated:
            return None
        held, length = self.tokens(name, call)
        rows = call.batch if part is None else part.rows
        if count != rows * len(held):
            raise UnsupportedError(
                f"record_routing, replay_routing: {name} received {count} tokens, which cannot be matched to the "
                f"{call.batch} x {call.tokens} tokens of the call."
            )
        # Index of token t of sample b: first_token + b * length + t.
        first = 0 if part is None else part.first_token
        return (first + torch.arange(rows).unsqueeze(1) * length + held).flatten()


class RouterWatch:
    """Base class: hooks the calls of a model and passes its routers' choices to `choose`.

    Attributes:
        replaces (`bool`): whether the choices are replaced. If they are only observed the graph is unchanged, since
            backward may recompute layers outside of the context.
    """

    replaces = True

    def __init__(self, routers: Routers):
        self.routers, self.model = routers, routers.model
        self.call: RoutedCall | None = None
        self._depth = 0
        self._modes: list[_Choices] = []

    def begin(self, call: RoutedCall) -> None:
        """Called before a call of the model."""

    def end(self, call: RoutedCall) -> None:
        """Called after a call of the model that did not raise."""

    def choose(self, name: str, call: RoutedCall, live: Tensor, is_group: bool) -> Tensor:
        """Returns the experts `[local, choices]` of a layer's tokens, given the router's own (`live`).

        `is_group`: the choice may only score the single group of all experts.
        """
        raise NotImplementedError

    def chosen(self) -> None:
        """Called after a router has run; only its last choice counts."""

    def groups(self, name: str, scores: Tensor, experts: int) -> Tensor:
        """Returns the scores `[tokens, groups]` by which groups of experts are selected."""
        return scores

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Registers hooks on the model and its blocks with routers, inside the context."""
        handles = []
        base: Any = self.model.base_model
        for module in (self.model,) if base is self.model else (self.model, base):
            handles += [
                module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._end, always_call=True),
            ]
        for name in self.routers.experts:
            block = self.model.get_submodule(name.rpartition(".")[0])
            handles += [
                block.register_forward_pre_hook(shard_safe(functools.partial(self._enter, name)), with_kwargs=True),
                block.register_forward_hook(
                    shard_safe(functools.partial(self._leave, name)), with_kwargs=True, always_call=True
                ),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self._modes:
                self._modes.pop().__exit__(None, None, None)

    @leave_uncompiled
    def _begin(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        inputs = next((kwargs[name] for name in _INPUTS if isinstance(kwargs.get(name), Tensor)), None)
        inputs = inputs if inputs is not None else next((value for value in args if isinstance(value, Tensor)), None)
        if inputs is None or inputs.dim() < 2:
            raise ConfigError("record_routing, replay_routing: the model was called without input_ids [batch, tokens].")
        self.call = RoutedCall(*inputs.shape[:2])
        self.begin(self.call)

    @leave_uncompiled
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self.call is not None:
            call, self.call = self.call, None
            # Hooks also run for calls that raise, without output.
            if output is not None:
                self.end(call)

    @leave_uncompiled
    def _enter(self, name: str, block: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        # Recomputed layers read their tapes instead.
        if in_backward() or self.call is None:
            return
        mode = _Choices(self, name, self.call, self.routers.experts[name])
        mode.__enter__()
        self._modes.append(mode)

    @leave_uncompiled
    def _leave(self, name: str, block: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        if not self._modes or self._modes[-1].name != name:
            return
        mode = self._modes.pop()
        mode.__exit__(None, None, None)
        values = (*args, *kwargs.values())
        looks_up = any(isinstance(value, Tensor) and not value.is_floating_point() for value in values)
        if output is not None and not mode.has_chosen and not looks_up:
            raise UnsupportedError(
                f"record_routing, replay_routing: the router of {name} ({type(block).__name__}) does not select "
                "experts with torch.topk, so its routing can be neither recorded nor replayed."
            )
        self.chosen()
        mode.call.seen.add(name)


class _Choices(TorchFunctionMode):
    """Replaces or observes the experts that `topk` returns in one router."""

    def __init__(self, attached: RouterWatch, name: str, call: RoutedCall, experts: int):
        super().__init__()
        self.attached, self.name, self.call, self.experts = attached, name, call, experts
        self.has_chosen = False

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Routers select experts, and groups of experts, by topk only.
        if func not in TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        # topk over other dims or shapes is not a choice of experts.
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1) % scores.dim()
        width = scores.shape[-1]
        if dim != scores.dim() - 1 or scores.dim() not in (2, 3):
            return func(*args, **kwargs)
        # Scores of all experts, [..., experts]: the choice of experts.
        if width >= self.experts:
            self.has_chosen = True
            # `choose` takes the choices of all tokens, [tokens, choices].
            if not self.attached.replaces:
                result = func(*args, **kwargs)
                self.attached.choose(self.name, self.call, result[1].flatten(0, -2), False)
                return result
            with torch.no_grad():
                # The router's own choice, for tokens without a record.
                live: Tensor = func(*args, **kwargs)[1]
            # A single group of all experts is scored by its two best experts first; it is selected in any case.
            is_group = scores.dim() == 3 and scores.shape[1] == 1
            chosen = self.attached.choose(self.name, self.call, live.flatten(0, -2), is_group).view(live.shape)
            # Values from the live scores, so that gradients reach the router.
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        # Scores of groups, [tokens, groups]: the choice of groups.
        if scores.dim() == 2 and self.experts % width == 0:
            scores = self.attached.groups(self.name, scores, self.experts)
            args, kwargs = (scores, *args[1:]), {key: value for key, value in kwargs.items() if key != "input"}
        return func(*args, **kwargs)

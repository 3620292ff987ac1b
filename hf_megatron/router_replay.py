"""Routing recorded in one forward and replayed in others (Megatron's `RouterReplay`; R3, Ma et al., 2025).

    with record_routing(model) as routing:        [layers, batch, tokens, choices] of each call
        model.generate(...)
    with replay_routing(model, routing.joined()):
        model(input_ids=..., labels=...).loss.backward()

Routers choose by `topk`, whose indices are answered with those recorded and whose values are the live scores at these:
gradients reach the router. Routers that draw groups first are given groups in which the recorded experts are. Tokens
are those of whole rows on every layout; a rank takes the ones that it computes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .communication.collectives import bounds
from .data_parallel.fully_sharded import outermost_layers
from .errors import ConfigError, UnsupportedError
from .expert_modules import find_experts
from .expert_parallel.routing import TOPK, install_tapes, is_taped
from .parallel_state import parallel_state
from .parts import works_on_parts
from .patch_ledger import LEDGER
from .registry import own_spec
from .spec import ModelSpec
from .upstream import in_backward, leave_uncompiled, reentrant_checkpoints

# Of no token, or of a layer with fewer choices.
ABSENT = -1
_INPUTS = ("input_ids", "inputs_embeds")


@dataclass
class Routing:
    """The experts that routers have chosen, of every call of a model.

    Attributes:
        layers: names of the modules that hold experts.
        calls: of each call `[layers, batch, tokens, choices]` in int32, on the model's device; -1 where a layer has
            fewer choices, or looks its experts up by token.
    """

    layers: tuple[str, ...]
    calls: list[Tensor] = field(default_factory=list)

    def joined(self, tokens: int | None = None) -> Tensor:
        """Returns `[layers, batch, tokens, choices]` of calls that continue each other, as those of `generate()` do.

        The last token that was generated has not been in a call: replayed in a call of one token more, that one is
        routed as its scores say.

        Args:
            tokens (`int`, *optional*): at most so many; ranks that wait for others in `generate()` go on past theirs.

        Raises:
            ConfigError: nothing was recorded, or calls that do not continue each other: of other rows, without a cache.
        """
        rows = {call.shape[1] for call in self.calls}
        if len(rows) != 1:
            raise ConfigError(f"Routing.joined: calls of {sorted(rows)} rows do not continue each other.")
        lengths = [call.shape[2] for call in self.calls]
        if len(lengths) > 1 and lengths[1] > lengths[0]:
            raise ConfigError(
                f"Routing.joined: calls of {lengths} tokens do not continue each other: generate with use_cache=True."
            )
        return torch.cat(self.calls, 2)[:, :, :tokens]


@dataclass
class _Call:
    """One call of the model: its rows, and the routing of all of its tokens `[layers, batch * tokens, choices]`."""

    batch: int
    tokens: int
    routing: Tensor | None = None
    seen: set[str] = field(default_factory=set)


@contextmanager
def record_routing(model: Any) -> Iterator[Routing]:
    """Records which experts the routers of a model choose in every call inside the context.

    It works on models laid out by hf_megatron, on every layout, and on others; every rank enters and leaves it.

    Args:
        model (`PreTrainedModel`): with experts.

    Returns:
        `Routing`: filled when the context is left, alike on all ranks that share a batch.

    Raises:
        ConfigError: a model without experts.
        UnsupportedError: a router that does not choose by `torch.topk`; compiled layers.
    """
    routers = _Routers(model)
    routing = Routing(routers.layers)
    recorder = _Recorder(routers)
    with recorder.attached():
        yield routing
    routing.calls += recorder.gathered()


@contextmanager
def replay_routing(model: Any, routing: Routing | Tensor) -> Iterator[None]:
    """Has the routers of a model choose recorded experts in every call inside the context.

    The weights of the choices are those of the scores at hand, and their gradients reach the routers. Layers that
    backward computes again take the same experts, also after the context is left.

    Args:
        model (`PreTrainedModel`): with experts.
        routing (`Routing` or `Tensor`): of as many calls; or `[layers, batch, tokens, choices]` for each of the calls.
            Tokens may be fewer than those of a call, and entries -1: what is not recorded is routed as its scores say.

    Raises:
        ConfigError: a model without experts; shapes or experts that do not fit; more calls than were recorded.
        UnsupportedError: a router that does not choose by `torch.topk`; compiled layers; reentrant checkpoints.
    """
    routers = _Routers(model)
    with _Player(routers, routing).attached():
        yield


class _Routers:
    """The blocks with routers of a model, and which tokens a rank has in them."""

    def __init__(self, model: Any):
        self.model, self.state = model, parallel_state(model)
        spec = self.state.spec if self.state is not None else own_spec(model) or ModelSpec(model.config.model_type)
        # Experts of this rank's layers count among all ranks'.
        self.experts = find_experts(model, spec)
        if self.state is not None and (plan := self.state.placed.get("ep")) is not None:
            self.experts = {name: plan.experts[name] for name in self.experts}
        self.layers = self._of_all_stages(tuple(self.experts))
        if not self.layers:
            raise ConfigError(f"record_routing, replay_routing: {type(model).__name__} has no layer with experts.")
        plan = None if self.state is None else self.state.placed.get("tp")
        self._split = frozenset() if plan is None else plan.split_mixtures

    def _of_all_stages(self, own: tuple[str, ...]) -> tuple[str, ...]:
        if self.state is None or self.state.mesh.pp_size == 1:
            return own
        stages: list[Any] = [None] * self.state.mesh.pp_size
        dist.all_gather_object(stages, own, group=self.state.mesh.host_group("pp"))
        return tuple(name for stage in stages for name in stage)

    def tokens(self, name: str, call: _Call) -> tuple[Tensor, int]:
        """Returns which tokens of a row, `[held]`, a layer is given on this rank, and the row's number of tokens."""
        state = self.state
        length = call.tokens if state is None or state.part is None else state.part.tokens
        held = torch.arange(length)
        context = LEDGER.context
        if context is not None and context.has_parts:
            held = context.row.order.tokens(context.groups.rank)
        if name.rpartition(".")[0] in self._split:
            assert state is not None
            start, stop = bounds(len(held), state.mesh.tp_size, dist.get_rank(state.mesh.tp_group))
            held = held[start:stop]
        return held, length

    def places(self, name: str, call: _Call, count: int) -> Tensor | None:
        """Returns where the tokens `[count]` of a layer lie in the call's rows, one after another.

        `None` for a microbatch that repeats another one. Raises `UnsupportedError` for other tokens than those.
        """
        part = None if self.state is None else self.state.part
        if part is not None and part.is_repeated:
            return None
        held, length = self.tokens(name, call)
        rows = call.batch if part is None else part.rows
        if count != rows * len(held):
            raise UnsupportedError(
                f"record_routing, replay_routing: {name} was given {count} tokens, of which it cannot be told which of "
                f"the {call.batch} x {call.tokens} tokens of the call they are."
            )
        first = 0 if part is None else part.first_token
        return (first + torch.arange(rows).unsqueeze(1) * length + held).flatten()


class _Attached:
    """Base: watches the calls of a model, and has `choose` decide in its routers."""

    def __init__(self, routers: _Routers):
        self.routers, self.model = routers, routers.model
        self.call: _Call | None = None
        self._depth = 0
        self._modes: list[_Choices] = []

    def begin(self, call: _Call) -> None:
        """Called before a call of the model."""

    def end(self, call: _Call) -> None:
        """Called behind one that did not raise."""

    def choose(self, name: str, call: _Call, live: Tensor, is_group: bool) -> Tensor:
        """Returns the experts `[held, choices]` of a layer's tokens, whose live choices those are, maybe of a group."""
        raise NotImplementedError

    def chosen(self) -> None:
        """Called behind a router, whose last choice counts."""

    def groups(self, name: str, scores: Tensor, experts: int) -> Tensor:
        """Returns the scores `[tokens, groups]` that groups of experts are drawn by."""
        return scores

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Puts hooks around the model and its blocks with routers."""
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
                block.register_forward_pre_hook(works_on_parts(functools.partial(self._enter, name)), with_kwargs=True),
                block.register_forward_hook(
                    works_on_parts(functools.partial(self._leave, name)), with_kwargs=True, always_call=True
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
        given = next((kwargs[name] for name in _INPUTS if isinstance(kwargs.get(name), Tensor)), None)
        given = given if given is not None else next((value for value in args if isinstance(value, Tensor)), None)
        if given is None or given.dim() < 2:
            raise ConfigError("record_routing, replay_routing: the model was called without input_ids [batch, tokens].")
        self.call = _Call(*given.shape[:2])
        self.begin(self.call)

    @leave_uncompiled
    def _end(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self.call is not None:
            call, self.call = self.call, None
            # Hooks run for calls that raise, too, with no output.
            if output is not None:
                self.end(call)

    @leave_uncompiled
    def _enter(self, name: str, block: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        # Layers that are computed again ask their tapes.
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
                f"record_routing, replay_routing: the router of {name} ({type(block).__name__}) does not choose by "
                "torch.topk: its choices can be neither seen nor replaced."
            )
        self.chosen()
        mode.call.seen.add(name)


class _Choices(TorchFunctionMode):
    """Has somebody else decide which experts the `topk` of one router returns."""

    def __init__(self, attached: _Attached, name: str, call: _Call, experts: int):
        super().__init__()
        self.attached, self.name, self.call, self.experts = attached, name, call, experts
        self.has_chosen = False

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1) % scores.dim()
        width = scores.shape[-1]
        if dim != scores.dim() - 1 or scores.dim() not in (2, 3):
            return func(*args, **kwargs)
        if width >= self.experts:
            self.has_chosen = True
            with torch.no_grad():
                live: Tensor = func(*args, **kwargs)[1]
            # Of one group of all experts the two best are taken first: whichever these are, it is drawn.
            is_group = scores.dim() == 3 and scores.shape[1] == 1
            chosen = self.attached.choose(self.name, self.call, live.flatten(0, -2), is_group).view(live.shape)
            return torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if scores.dim() == 2 and self.experts % width == 0:
            scores = self.attached.groups(self.name, scores, self.experts)
            args, kwargs = (scores, *args[1:]), {key: value for key, value in kwargs.items() if key != "input"}
        return func(*args, **kwargs)


class _Recorder(_Attached):
    """Writes down what routers choose."""

    def __init__(self, routers: _Routers):
        super().__init__(routers)
        self.calls: list[tuple[_Call, dict[str, list[list[Tensor]]]]] = []
        self._last: tuple[str, Tensor, Tensor] | None = None

    def begin(self, call: _Call) -> None:
        self.calls.append((call, {}))

    def choose(self, name: str, call: _Call, live: Tensor, is_group: bool) -> Tensor:
        if (places := self.routers.places(name, call, len(live))) is not None:
            self._last = name, places, live.to(torch.int32)
        return live

    def chosen(self) -> None:
        if self._last is not None:
            (name, *part), self._last = self._last, None
            self.calls[-1][1].setdefault(name, []).append(part)

    def gathered(self) -> list[Tensor]:
        """Returns what all ranks that share the batch have recorded of each call."""
        state, layers = self.routers.state, self.routers.layers
        device = next(self.model.parameters()).device if state is None else state.mesh.device
        widest = torch.tensor(
            max((part.shape[1] for _, parts in self.calls for found in parts.values() for _, part in found), default=0),
            device=device,
        )
        self._over_ranks(widest)
        size = len(layers), int(widest)
        wholes = [torch.full((size[0], c.batch * c.tokens, size[1]), ABSENT, dtype=torch.int32) for c, _ in self.calls]
        for (_, parts), whole in zip(self.calls, wholes, strict=True):
            for name, found in parts.items():
                for places, part in found:
                    whole[layers.index(name), places, : part.shape[1]] = part.cpu()
        if not wholes:
            return []
        total = torch.cat(wholes, 1).to(device)
        self._over_ranks(total)
        parts_of_calls = total.split([whole.shape[1] for whole in wholes], 1)
        pairs = zip(self.calls, parts_of_calls, strict=True)
        return [part.unflatten(1, (call.batch, call.tokens)) for (call, _), part in pairs]

    def _over_ranks(self, whole: Tensor) -> None:
        """Takes the largest entries of the ranks that share a batch: what a rank has not is -1."""
        state = self.routers.state
        if state is None:
            return
        for axis in ("tp", "cp", "pp"):
            if state.axes.size(axis) > 1:
                dist.all_reduce(whole, dist.ReduceOp.MAX, group=state.mesh.group(axis))


class _Player(_Attached):
    """Answers routers with what was recorded."""

    def __init__(self, routers: _Routers, routing: Routing | Tensor):
        super().__init__(routers)
        self.routing = routing
        self._calls = 0
        if isinstance(routing, Routing) and routing.layers != routers.layers:
            raise ConfigError(
                f"replay_routing: recorded of the layers {list(routing.layers)}, and the model has "
                f"{list(routers.layers)}."
            )
        for recorded in routing.calls if isinstance(routing, Routing) else (routing,):
            self._require(recorded)
        self._keep_tapes()

    def _require(self, recorded: Tensor) -> None:
        layers, experts = len(self.routers.layers), max(self.routers.experts.values(), default=0)
        if recorded.dim() != 4 or recorded.is_floating_point() or recorded.shape[0] != layers:
            raise ConfigError(
                f"replay_routing: routing of {tuple(recorded.shape)} in {recorded.dtype}; it has to be [layers, "
                f"batch, tokens, choices] of integers, with the {layers} layers of the model that have experts."
            )
        largest = int(recorded.max()) if recorded.numel() else ABSENT
        if experts and largest >= experts or (recorded.numel() and int(recorded.min()) < ABSENT):
            raise ConfigError(
                f"replay_routing: experts are {int(recorded.min())} to {largest}; the model's are 0 to {experts - 1}, "
                "and -1 is a choice that was not recorded."
            )

    def _keep_tapes(self) -> None:
        """Has layers that backward computes again keep what is replayed: backward may come later."""
        layer_of = {id(part): layer for layer in outermost_layers(self.model) for part in layer.modules()}
        for name in self.routers.experts:
            block: Any = self.model.get_submodule(name.rpartition(".")[0])
            layer: Any = layer_of.get(id(block), block)
            if not getattr(layer, "gradient_checkpointing", False):
                continue
            if reentrant_checkpoints(layer):
                raise UnsupportedError(
                    "replay_routing: checkpoints with use_reentrant=True route again in backward. Enable them with "
                    '{"use_reentrant": False}.'
                )
            if not is_taped(layer):
                install_tapes(layer, block)

    def begin(self, call: _Call) -> None:
        routing = self.routing
        if isinstance(routing, Routing):
            if self._calls >= len(routing.calls):
                raise ConfigError(
                    f"replay_routing: call {self._calls + 1} of the model, and {len(routing.calls)} were recorded."
                )
            routing = routing.calls[self._calls]
        self._calls += 1
        batch, tokens = routing.shape[1:3]
        if batch != call.batch or tokens > call.tokens:
            raise ConfigError(
                f"replay_routing: routing of {batch} rows of {tokens} tokens for a call of {call.batch} rows of "
                f"{call.tokens}."
            )
        missing = call.tokens - tokens
        call.routing = nn.functional.pad(routing, (0, 0, 0, missing), value=ABSENT).flatten(1, 2)

    def end(self, call: _Call) -> None:
        if left := [name for name in self.routers.experts if name not in call.seen]:
            raise UnsupportedError(
                f"replay_routing: the router of {left[0]} was not asked in this call, as in compiled or left out "
                "layers: nothing was replayed in it."
            )

    def choose(self, name: str, call: _Call, live: Tensor, is_group: bool) -> Tensor:
        places = self.routers.places(name, call, len(live))
        if places is None:
            return live
        recorded, choices = self._recorded(name, call, places, live.device), live.shape[1]
        if recorded.shape[1] < choices and is_group:
            return live
        if recorded.shape[1] < choices:
            raise ConfigError(
                f"replay_routing: routing of {recorded.shape[1]} choices, and the router of {name} makes {choices}."
            )
        recorded = recorded[:, :choices]
        return live.where((recorded < 0).any(1, keepdim=True), recorded)

    def groups(self, name: str, scores: Tensor, experts: int) -> Tensor:
        assert self.call is not None
        places = self.routers.places(name, self.call, len(scores))
        if places is None:
            return scores
        recorded = self._recorded(name, self.call, places, scores.device)
        group = recorded.div(experts // scores.shape[1], rounding_mode="floor").where(recorded >= 0, scores.shape[1])
        is_hit = scores.new_zeros((len(scores), scores.shape[1] + 1), dtype=torch.bool)
        is_hit = is_hit.scatter_(1, group.to(torch.int64), True)[:, :-1]
        return scores.masked_fill(is_hit, torch.inf)

    def _recorded(self, name: str, call: _Call, places: Tensor, device: torch.device) -> Tensor:
        assert call.routing is not None
        layer = call.routing[self.routers.layers.index(name)]
        return layer.index_select(0, places.to(layer.device)).to(device, torch.int64)

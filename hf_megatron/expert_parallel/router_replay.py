"""Routing recorded in one forward and replayed in others (Megatron's `RouterReplay`; R3, Ma et al., 2025).

    with record_routing(model) as routing:        [layers, batch, tokens, choices] of each call
        model.generate(...)
    with replay_routing(model, routing.joined()):
        model(input_ids=..., labels=...).loss.backward()

Routers choose by `topk`: it returns the recorded indices with the live scores at these, so that gradients reach the
router. Routers that select groups first are given the groups of the recorded experts. Recorded tokens are those in full
sequences, whatever the layout; a rank uses the ones that it computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_autograd import reentrant_checkpoints
from ..core.axes import REPLICA_AXES
from ..data_parallel.fsdp import outermost_layers
from ..errors import ConfigError, UnsupportedError
from ..models.registry import registered_spec
from ..models.spec import ModelSpec
from ..parallel_state import parallel_state
from .router_hooks import RoutedCall, Routers, RouterWatch
from .routing_cache import install_tapes, is_taped

# Entry of a token that was not recorded, or of a layer with fewer choices.
ABSENT = -1


@dataclass
class Routing:
    """Experts that routers have chosen, for every call of a model.

    Attributes:
        layers: names of the modules that hold experts.
        calls: for each call `[layers, batch, tokens, choices]` in int32, on the model's device; -1 where a layer has
            fewer choices, or looks its experts up by token.
    """

    layers: tuple[str, ...]
    calls: list[Tensor] = field(default_factory=list)

    def joined(self, tokens: int | None = None) -> Tensor:
        """Returns `[layers, batch, tokens, choices]` of calls that continue each other, as in `generate()`.

        The last generated token was never an input: replayed in a call with one more token, it is routed by its scores.

        Args:
            tokens (`int`, *optional*): maximum number of tokens; in `generate()`, ranks that wait for others continue
                past their own end.

        Raises:
            ConfigError: nothing was recorded, or the calls do not continue each other (other batch sizes, no cache).
        """
        rows = {call.shape[1] for call in self.calls}
        if len(rows) != 1:
            raise ConfigError(f"Routing.joined: expected calls of one batch size, got batch sizes {sorted(rows)}.")
        lengths = [call.shape[2] for call in self.calls]
        if len(lengths) > 1 and lengths[1] > lengths[0]:
            raise ConfigError(
                f"Routing.joined: calls of {lengths} tokens are not incremental. Generate with use_cache=True."
            )
        return torch.cat(self.calls, 2)[:, :, :tokens]


@contextmanager
def record_routing(model: Any) -> Iterator[Routing]:
    """Records which experts the routers of a model choose in every call inside the context.

    Works on models parallelized by hf_megatron, with every layout, and on others; entering and leaving is collective.

    Args:
        model (`PreTrainedModel`): with experts.

    Returns:
        `Routing`: filled when the context is left, identical on all ranks that share a batch.

    Raises:
        ConfigError: a model without experts.
        UnsupportedError: a router that does not choose by `torch.topk`; compiled layers.
    """
    routers = _get_routers(model)
    routing = Routing(routers.layers)
    recorder = _Recorder(routers)
    with recorder.attached():
        yield routing
    routing.calls += recorder.gathered()


@contextmanager
def replay_routing(model: Any, routing: Routing | Tensor) -> Iterator[None]:
    """Replays recorded experts in the routers of a model, in every call inside the context.

    The routing weights come from the live scores, and their gradients reach the routers. Layers that backward
    recomputes use the same experts, even after the context is left.

    Args:
        model (`PreTrainedModel`): with experts.
        routing (`Routing` or `Tensor`): one entry per call; or `[layers, batch, tokens, choices]` for every call. It
            may have fewer tokens than a call, and entries -1: those are routed by their scores.

    Raises:
        ConfigError: a model without experts; shapes or experts that do not fit; more calls than were recorded.
        UnsupportedError: a router that does not choose by `torch.topk`; compiled layers; reentrant checkpoints.
    """
    routers = _get_routers(model)
    with _Player(routers, routing).attached():
        yield


def _get_routers(model: Any) -> Routers:
    state = parallel_state(model)
    return Routers(
        model, state.spec if state is not None else registered_spec(model) or ModelSpec(model.config.model_type)
    )


class _Recorder(RouterWatch):
    """Records the choices of routers."""

    replaces = False

    def __init__(self, routers: Routers):
        super().__init__(routers)
        self.calls: list[tuple[RoutedCall, dict[str, list[list[Tensor]]]]] = []
        self._last: tuple[str, Tensor, Tensor] | None = None

    def begin(self, call: RoutedCall) -> None:
        self.calls.append((call, {}))

    def choose(self, name: str, call: RoutedCall, live: Tensor, is_group: bool) -> Tensor:
        if (places := self.routers.places(name, call, len(live))) is not None:
            self._last = name, places, live.to(torch.int32)
        return live

    def chosen(self) -> None:
        if self._last is not None:
            (name, *part), self._last = self._last, None
            # (indices of the tokens, choices) of one microbatch.
            self.calls[-1][1].setdefault(name, []).append(part)

    def gathered(self) -> list[Tensor]:
        """Returns the recorded choices of each call, merged over all ranks that share the batch."""
        state, layers = self.routers.state, self.routers.layers
        device = next(self.model.parameters()).device if state is None else state.mesh.device
        widest = torch.tensor(
            max(
                (part.shape[1] for _, parts in self.calls for entries in parts.values() for _, part in entries),
                default=0,
            ),
            device=device,
        )
        self._over_ranks(widest)
        size = len(layers), int(widest)
        # [layers, batch * tokens, choices] per call, -1 for tokens of other ranks; merged by MAX.
        full_tensors = [
            torch.full((size[0], c.batch * c.tokens, size[1]), ABSENT, dtype=torch.int32) for c, _ in self.calls
        ]
        for (_, parts), full in zip(self.calls, full_tensors, strict=True):
            for name, entries in parts.items():
                for places, part in entries:
                    # Layers with fewer choices than the widest one keep -1 in the remaining entries.
                    full[layers.index(name), places, : part.shape[1]] = part.cpu()
        if not full_tensors:
            return []
        total = torch.cat(full_tensors, 1).to(device)
        self._over_ranks(total)
        parts_of_calls = total.split([full.shape[1] for full in full_tensors], 1)
        pairs = zip(self.calls, parts_of_calls, strict=True)
        return [part.unflatten(1, (call.batch, call.tokens)) for (call, _), part in pairs]

    def _over_ranks(self, unsharded: Tensor) -> None:
        """Takes the maximum over the ranks that share a batch: entries that a rank does not have are -1."""
        state = self.routers.state
        if state is None:
            return
        for axis in REPLICA_AXES:
            if state.axes.size(axis) > 1:
                dist.all_reduce(unsharded, dist.ReduceOp.MAX, group=state.mesh.group(axis))


class _Player(RouterWatch):
    """Returns recorded choices to routers."""

    def __init__(self, routers: Routers, routing: Routing | Tensor):
        super().__init__(routers)
        self.routing = routing
        self._calls = 0
        if isinstance(routing, Routing) and routing.layers != routers.layers:
            raise ConfigError(
                f"replay_routing: the routing was recorded for the layers {list(routing.layers)}, but the model has "
                f"{list(routers.layers)}."
            )
        for recorded in routing.calls if isinstance(routing, Routing) else (routing,):
            self._require(recorded)
        self._keep_tapes()

    def _require(self, recorded: Tensor) -> None:
        layers, experts = len(self.routers.layers), max(self.routers.experts.values(), default=0)
        if recorded.dim() != 4 or recorded.is_floating_point() or recorded.shape[0] != layers:
            raise ConfigError(
                f"replay_routing: got routing of shape {tuple(recorded.shape)} and dtype {recorded.dtype}; expected "
                f"integers [layers, batch, tokens, choices] for the model's {layers} MoE layers."
            )
        largest = int(recorded.max()) if recorded.numel() else ABSENT
        if experts and largest >= experts or (recorded.numel() and int(recorded.min()) < ABSENT):
            raise ConfigError(
                f"replay_routing: expert indices are {int(recorded.min())} to {largest}; valid are 0 to {experts - 1}, "
                "and -1 for a choice that was not recorded."
            )

    def _keep_tapes(self) -> None:
        """Installs tapes on layers that backward recomputes, which may happen after the context is left."""
        layer_by_module_id = {id(part): layer for layer in outermost_layers(self.model) for part in layer.modules()}
        for name in self.routers.experts:
            block: Any = self.model.get_submodule(name.rpartition(".")[0])
            layer: Any = layer_by_module_id.get(id(block), block)
            if not getattr(layer, "gradient_checkpointing", False):
                continue
            if reentrant_checkpoints(layer):
                raise UnsupportedError(
                    "replay_routing: gradient checkpointing with use_reentrant=True runs the router again in backward. "
                    'Enable it with {"use_reentrant": False}.'
                )
            if not is_taped(layer):
                install_tapes(layer, block)

    def begin(self, call: RoutedCall) -> None:
        routing = self.routing
        if isinstance(routing, Routing):
            if self._calls >= len(routing.calls):
                raise ConfigError(
                    f"replay_routing: call {self._calls + 1} of the model, but only {len(routing.calls)} were recorded."
                )
            routing = routing.calls[self._calls]
        self._calls += 1
        batch, tokens = routing.shape[1:3]
        if batch != call.batch or tokens > call.tokens:
            raise ConfigError(
                f"replay_routing: routing of {batch} samples of {tokens} tokens for a call with {call.batch} samples "
                f"of {call.tokens} tokens."
            )
        # [layers, batch, tokens, choices] -> [layers, batch * call tokens, choices], -1 for tokens without a record.
        missing = call.tokens - tokens
        call.routing = nn.functional.pad(routing, (0, 0, 0, missing), value=ABSENT).flatten(1, 2)

    def end(self, call: RoutedCall) -> None:
        if left := [name for name in self.routers.experts if name not in call.seen]:
            raise UnsupportedError(
                f"replay_routing: the router of {left[0]} did not run in this call (compiled or skipped layer?), so "
                "its routing was not replayed."
            )

    def choose(self, name: str, call: RoutedCall, live: Tensor, is_group: bool) -> Tensor:
        places = self.routers.places(name, call, len(live))
        if places is None:
            return live
        # [local tokens, recorded choices]
        recorded, choices = self._recorded(name, call, places, live.device), live.shape[1]
        # The topk that scores a single group selects two experts, possibly more than were recorded.
        if recorded.shape[1] < choices and is_group:
            return live
        if recorded.shape[1] < choices:
            raise ConfigError(
                f"replay_routing: {recorded.shape[1]} experts per token were recorded, but the router of {name} "
                f"selects {choices}."
            )
        # Tokens with an unrecorded choice keep all of their own choices.
        recorded = recorded[:, :choices]
        return live.where((recorded < 0).any(1, keepdim=True), recorded)

    def groups(self, name: str, scores: Tensor, experts: int) -> Tensor:
        assert self.call is not None
        places = self.routers.places(name, self.call, len(scores))
        if places is None:
            return scores
        recorded = self._recorded(name, self.call, places, scores.device)
        # Select the groups of the recorded experts: infinite scores; unrecorded entries fall into an extra column.
        group = recorded.div(experts // scores.shape[1], rounding_mode="floor").where(recorded >= 0, scores.shape[1])
        is_hit = scores.new_zeros((len(scores), scores.shape[1] + 1), dtype=torch.bool)
        is_hit = is_hit.scatter_(1, group.to(torch.int64), True)[:, :-1]
        return scores.masked_fill(is_hit, torch.inf)

    def _recorded(self, name: str, call: RoutedCall, places: Tensor, device: torch.device) -> Tensor:
        assert call.routing is not None
        layer = call.routing[self.routers.layers.index(name)]
        # [batch * tokens, choices] -> [local tokens, choices]
        return layer.index_select(0, places.to(layer.device)).to(device, torch.int64)

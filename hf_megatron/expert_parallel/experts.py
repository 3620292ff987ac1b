"""Parallel experts module of a layer: dispatches tokens to the ranks' experts around the module's own forward."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..compat.shard_safe import shard_safe
from ..compat.torch_autograd import in_backward, leave_uncompiled
from ..compat.torch_dtensor import local_tensor
from ..compat.transformers_models import grouped_rows
from ..core.communication.collectives import gather_from_ranks, split_over_ranks
from ..errors import UnsupportedError
from ..tensor_parallel.local_parameters import ActiveForwards
from .expert_load import ExpertCounts
from .routing_cache import LayerTapes
from .shared_experts import SharedExperts
from .token_dispatcher import Dispatched, Dispatcher, ExpertBlocks, Route, add_rows


@dataclass
class ExpertRanks:
    """Settings of a layer's token dispatch; a deep copy of the layer has its own tapes and shared experts.

    Attributes:
        dispatcher (`Dispatcher`): sends rows to the experts' ranks and back.
        held (`ExpertBlocks`): which experts each of these ranks holds.
        identity_share (*optional*): fraction of an identity expert's output that this rank adds.
        shared_with (*optional*): group of ranks with the same tokens; each rank dispatches its share of them.
        tapes (`LayerTapes`): choices of the layer's routers, for forwards that backward recomputes.
        counts (`ExpertCounts`): counts of the choices in training.
        name: of the module in its model.
        counter: attribute of the module with the number of experts.
        shapes: parameter -> its full shape and its local shape.
        shared (`SharedExperts`, *optional*): of the same block, computed while rows are in flight.
    """

    dispatcher: Dispatcher
    held: ExpertBlocks
    identity_share: float | None
    shared_with: Any
    tapes: LayerTapes
    counts: ExpertCounts
    name: str
    counter: str
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    shared: SharedExperts | None

    def __deepcopy__(self, memo: dict) -> "ExpertRanks":
        return replace(self, tapes=copy.deepcopy(self.tapes, memo), shared=copy.deepcopy(self.shared, memo))


class ParallelExperts:
    """Mixin of an experts module `(hidden, chosen, weights)` that holds some of the experts.

    Each choice of a token is computed as a separate row with weight 1: every implementation in transformers multiplies
    by the routing weight last, and here that happens where the choices of a row are summed.
    """

    ranks: ExpertRanks
    training: bool
    forwards: ActiveForwards
    shard_name: str | None

    @contextmanager
    def _as_own(self) -> Iterator[None]:
        """Sets the module's number of experts to the local one inside the context, as its own forward reads it."""
        ranks = self.ranks
        # Also detects experts that were added or removed since loading: their number or shapes have changed.
        present, num_local = getattr(self, ranks.counter), ranks.dispatcher.experts
        parts = dict(self.named_parameters())  # type: ignore[attr-defined]
        mismatched = [
            f"{ranks.name}.{name}"
            for name, shapes in ranks.shapes.items()
            if name in parts and (parts[name].shape, local_tensor(parts[name]).shape) != shapes
        ]
        if present != num_local * ranks.dispatcher.ranks or mismatched:
            raise UnsupportedError(
                f"{mismatched[0] if mismatched else f'{ranks.name}.{ranks.counter}'} has another number or "
                "width of experts than "
                f"was loaded over {ranks.dispatcher.ranks} expert-parallel ranks "
                f"({ranks.dispatcher.ranks} x {num_local} "
                "experts). Prune or add experts in a single process, save the model and load it."
            )
        setattr(self, ranks.counter, num_local)
        try:
            yield
        finally:
            setattr(self, ranks.counter, present)

    @shard_safe
    @leave_uncompiled
    def forward(self, hidden: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        routing = (*routing, *named.values())
        # [batch, sequence, width] -> [tokens, width]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = routing if len(routing) == 2 else (self._one_after_another(tokens), None)
        if len(routing) not in (0, 2) or chosen.is_floating_point() or len(chosen) != len(tokens):
            raise UnsupportedError(
                f"{type(self).__name__} was called with {[tuple(part.shape) for part in (hidden, *routing)]}: with "
                "ep_size > 1, experts take hidden states and each token's expert indices and weights."
            )
        count, group, dispatcher = len(tokens), self.ranks.shared_with, self.ranks.dispatcher
        is_counted = self.training and not in_backward()
        counted = self.ranks.counts.padding.drop(self.ranks.name, chosen) if is_counted else chosen
        # tp ranks hold the same tokens: each dispatches [tokens / tp], and the outputs are gathered at the end.
        if group is not None:
            tokens, chosen = split_over_ranks(tokens, 0, group), split_over_ranks(chosen, 0, group)
            weights = None if weights is None else split_over_ranks(weights, 0, group)
            counted = split_over_ranks(counted, 0, group)
        # Renumber expert ids so that each rank's experts are consecutive.
        numbered = self.ranks.held.by_rank(chosen)
        # [local tokens, width] and [local tokens, choices] -> rows for this rank's experts, [rows received, width].
        dispatched, route = dispatcher.dispatch(
            tokens, numbered, weights, self.ranks.tapes.route(), self._meanwhile(hidden)
        )
        self.ranks.tapes.note(route)
        if is_counted:
            self.ranks.counts.note(self.ranks.name, counted, route, tokens[:1].nbytes, dispatcher.rank)
        # [rows received, width] -> [local tokens, width], summed over the ranks of each token's experts.
        total = dispatcher.combine(self._computed(dispatched, route), route)
        if self.ranks.identity_share is not None and weights is not None:
            # Identity experts have no parameters and live on no rank: add their weighted input here.
            share = weights.masked_fill(chosen < self.ranks.held.experts, 0).sum(1, keepdim=True)
            total = total + (tokens * (share * self.ranks.identity_share)).to(total.dtype)
        if group is not None:
            # [local tokens, width] -> [tokens, width]
            total = gather_from_ranks(total, 0, count, group)
        # FSDP2 hooks the outputs of a unit, and loses track of a view that is modified in place.
        return total if hidden.dim() == 2 else total.view(hidden.shape).clone()

    def _meanwhile(self, hidden: Tensor) -> Callable[[], None] | None:
        shared = self.ranks.shared
        if shared is None:
            return None
        return functools.partial(shared.compute, hidden, self.ranks.tapes.shared_take(shared.takes))

    def _computed(self, dispatched: Dispatched, route: Route) -> Tensor:
        """Returns `[rows received, width]`: each row's weighted sum over its choices among this rank's experts."""
        # [rows received, width], [rows received, choices] each.
        rows, experts, weights = dispatched
        # Sort (row, choice) pairs by expert; choices of other ranks' experts have the largest id and come last.
        ordered, order = experts.flatten().sort(stable=True)
        order, ordered = order[: route.pairs], ordered[: route.pairs]
        # [pairs, width]: one copy of a row for each of its local choices.
        places = order.div(experts.shape[1], rounding_mode="floor")
        expert_inputs = rows.index_select(0, places)
        if not route.pairs:
            # Keep parameters and inputs in the graph: gradients are zero as in a single process, and this rank joins
            # the collectives of the backward.
            ordered = torch.arange(self.ranks.dispatcher.experts, device=rows.device)
            expert_inputs = torch.cat([expert_inputs, rows.new_zeros((len(ordered), rows.shape[1]))])
        outputs = self._compute(expert_inputs, ordered, weights is not None)[: route.pairs]
        if weights is not None:
            # [pairs, 1] routing weights, applied in fp32.
            share = weights.flatten().index_select(0, order).unsqueeze(-1)
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32)) * share
        # [pairs, width] -> [rows received, width]
        return add_rows(outputs, places, len(rows)).to(rows.dtype)

    def _compute(self, rows: Tensor, experts: Tensor, are_weighed: bool) -> Tensor:
        """Returns `[pairs, width]`: one expert (`[pairs]`) applied to each row; the rows are sorted by expert."""
        self.forwards.require_full(self, self.shard_name)  # type: ignore[arg-type]
        with self.forwards.enter_module(), self._as_own():
            grouped = grouped_rows(self, rows, experts) if are_weighed else None
        if grouped is not None:
            return grouped
        chosen = experts.unsqueeze(-1)
        weights = rows.new_ones(chosen.shape)
        if self.ranks.identity_share is not None:
            # LongCat squeezes the top-k dim when k == 1; append an identity expert with weight 0 to keep it.
            chosen, weights = pad(chosen, (0, 1), value=self.ranks.dispatcher.experts), pad(weights, (0, 1))
        routing = (chosen, weights) if are_weighed else ()
        with self._as_own():
            outputs: Tensor = super().forward(rows, *routing)  # type: ignore[misc]
        return outputs.view(len(rows), -1)

    def _one_after_another(self, tokens: Tensor) -> Tensor:
        """Returns the choices `[experts * tokens, 1]` if every expert gets all tokens, in order of the experts."""
        dispatcher = self.ranks.dispatcher
        experts = dispatcher.experts * dispatcher.ranks
        each = torch.arange(experts, device=tokens.device)
        return each.repeat_interleave(len(tokens) // experts, output_size=len(tokens)).unsqueeze(-1)

"""Simulation of one step of a pipeline schedule from its stages' costs: compute, idle time and live microbatches."""

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.spans import Span, Timeline
from ..errors import ConfigError
from .schedules import Action, Kind, Plan, assign_stage_ranks, computations, schedule

_RECEIVES = {
    Kind.FORWARD: "receive_forward",
    Kind.BACKWARD: "receive_backward",
    Kind.BACKWARD_INPUT: "receive_backward",
}
# Actions that release a microbatch's activations on a stage.
_ENDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
# Schedules are periodic after this many times the number of stages in microbatches.
_SETTLED = 4


@dataclass(frozen=True)
class StageCosts:
    """Seconds that one stage takes for one microbatch.

    Args:
        forward (`float`): time of the forward.
        inputs, weights (`float`): times of the two steps of a backward; an unsplit backward takes their sum.
    """

    forward: float
    inputs: float
    weights: float

    def of(self, kind: Kind) -> float:
        """Returns the seconds of a computation; 0 for a send or a receive, which do not occupy a rank."""
        if kind is Kind.FORWARD:
            return self.forward
        if kind is Kind.BACKWARD:
            return self.inputs + self.weights
        return {Kind.BACKWARD_INPUT: self.inputs, Kind.BACKWARD_WEIGHT: self.weights}.get(kind, 0.0)


class SimulatedSpan(NamedTuple):
    """A computation of a rank, from `start` to `stop` in seconds since the start of the step."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class SimulatedStep:
    """Result of `simulate`.

    Attributes:
        spans: computations of each rank, in its order.
        duration (`float`): seconds until the last rank has finished.
        idle: seconds that each rank is idle within `duration`.
        live: maximum number of microbatches of each stage between their forward and their last gradients.
    """

    spans: tuple[tuple[SimulatedSpan, ...], ...]
    duration: float
    idle: tuple[float, ...]
    live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time."""
        return sum(self.idle) / (len(self.idle) * self.duration) if self.duration else 0.0


def simulate(
    name: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    costs: Sequence[StageCosts],
    sends: float | Sequence[float] = 0.0,
) -> SimulatedStep:
    """Simulates one step of a schedule.

    A rank computes in the schedule's order and waits for inputs when it needs them. Sends do not occupy a rank. They
    occupy the link between two ranks in their direction, one after the other.

    Args:
        name, ranks, stages_per_rank, microbatches: as for `rank_actions`.
        costs: costs of each of the `ranks * stages_per_rank` stages.
        sends (`float` or one for each pair of neighboring stages, defaults to 0): seconds to send the activation or
            gradient of a microbatch to another rank; stages on the same rank need no send.

    Raises:
        ConfigError: as `check_schedule`; if the number of costs or sends is wrong; if the order deadlocks.
    """
    orders = computations(name, ranks, stages_per_rank, microbatches)
    return simulate_orders(orders, assign_stage_ranks(name, ranks, stages_per_rank), costs, sends)


def simulate_orders(
    orders: Plan, rank_of: Sequence[int], costs: Sequence[StageCosts], sends: float | Sequence[float] = 0.0
) -> SimulatedStep:
    """Simulates the given actions as `simulate` does; sends and receives among them are ignored.

    Args:
        orders: actions of each rank.
        rank_of: rank of each stage.
        costs, sends: as for `simulate`.
    """
    crossings = _crossings(rank_of, costs, sends)
    last, count = len(rank_of) - 1, len(orders)
    waiting = [[action for action in order if not action.kind.communicates] for order in orders]
    clocks, following = [0.0] * count, [0] * count
    spans: list[list[SimulatedSpan]] = [[] for _ in orders]
    # (is forward, receiving stage, microbatch) -> time at which the activation or gradient arrives.
    arrived: dict[tuple[bool, int, int], float] = {}
    blocked: dict[tuple[bool, int, int], int] = {}
    free: dict[tuple[int, int], float] = {}
    # Each rank runs until it has to wait, and continues when its input is sent, so every action is handled once.
    ready = deque(range(count))
    while ready:
        rank = ready.popleft()
        order, index, clock = waiting[rank], following[rank], clocks[rank]
        while index < len(order):
            action = order[index]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            forward, start = kind is Kind.FORWARD, clock
            if kind is not Kind.BACKWARD_WEIGHT and stage != (0 if forward else last):
                needed = forward, stage, microbatch
                if needed not in arrived:
                    blocked[needed] = rank
                    break
                start = max(start, arrived.pop(needed))
            clock = start + costs[stage].of(kind)
            spans[rank].append(SimulatedSpan(rank, action, start, clock))
            index += 1
            other = stage + 1 if forward else stage - 1
            if kind is Kind.BACKWARD_WEIGHT or not 0 <= other <= last:
                continue
            there, takes = clock, crossings[min(stage, other)]
            if takes:
                # Sends over the same link are serialized.
                link = rank, rank_of[other]
                there = free[link] = max(clock, free.get(link, 0.0)) + takes
            arrived[forward, other, microbatch] = there
            if (receiver := blocked.pop((forward, other, microbatch), None)) is not None:
                ready.append(receiver)
        following[rank], clocks[rank] = index, clock
    _require_finished(waiting, following)
    duration = max(clocks, default=0.0)
    idle = tuple(duration - sum(span.stop - span.start for span in row) for row in spans)
    return SimulatedStep(tuple(map(tuple, spans)), duration, idle, live_microbatches(orders, len(rank_of)))


def _crossings(
    rank_of: Sequence[int], costs: Sequence[StageCosts], sends: float | Sequence[float]
) -> tuple[float, ...]:
    """Returns the seconds of a send from each stage to the next one; 0 if both are on the same rank."""
    stages = len(rank_of)
    if len(costs) != stages:
        raise ConfigError(f"costs of {len(costs)} stages: expected {stages}.")
    each = [sends] * (stages - 1) if isinstance(sends, (int, float)) else list(sends)
    if len(each) != stages - 1:
        raise ConfigError(f"sends between {len(each)} pairs of stages: expected {stages - 1}, or one number.")
    pairs = zip(each, rank_of[:-1], rank_of[1:], strict=True)
    return tuple(0.0 if one == other else float(seconds) for seconds, one, other in pairs)


def _require_finished(waiting: Sequence[Sequence[Action]], following: Sequence[int]) -> None:
    stuck = [
        f"rank {rank} at {order[index]}"
        for rank, (order, index) in enumerate(zip(waiting, following, strict=True))
        if index < len(order)
    ]
    if stuck:
        raise ConfigError(f"The pipeline schedule deadlocks: {', '.join(stuck)}.")


def live_microbatches(orders: Plan, stages: int) -> tuple[int, ...]:
    """Returns for each stage the maximum number of microbatches between their forward and their last gradients."""
    live, most = [0] * stages, [0] * stages
    for order in orders:
        for action in order:
            if action.kind is Kind.FORWARD:
                live[action.stage] += 1
                most[action.stage] = max(most[action.stage], live[action.stage])
            elif action.kind in _ENDS:
                live[action.stage] -= 1
    return tuple(most)


def most_held(order: Sequence[Action], size_of: Mapping[int, float]) -> float:
    """Returns the peak size of the live microbatches of one rank's stages.

    Args:
        order: the rank's actions.
        size_of: stage -> size of one microbatch, in any unit.
    """
    held = most = 0.0
    for action in order:
        if action.kind is Kind.FORWARD:
            held += size_of[action.stage]
            most = max(most, held)
        elif action.kind in _ENDS:
            held -= size_of[action.stage]
    return most


def simulated_seconds(
    name: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    costs: Sequence[StageCosts],
    sends: float | Sequence[float] = 0.0,
) -> float:
    """Returns the duration of `simulate`, extrapolated from two shorter steps if there are many microbatches.

    Schedules are periodic once the pipeline is full: each further round of microbatches takes the same time. This keeps
    planner searches with thousands of calls fast.
    """
    # Both have the same remainder modulo `ranks` as the full number.
    more = _SETTLED * ranks * stages_per_rank + microbatches % ranks
    few = more - ranks * stages_per_rank
    runs = schedule(name).runs
    if microbatches <= more or not all(runs(ranks, stages_per_rank, count) for count in (few, more)):
        return simulate(name, ranks, stages_per_rank, microbatches, costs, sends).duration
    rest = simulate(name, ranks, stages_per_rank, few, costs, sends).duration
    full = simulate(name, ranks, stages_per_rank, more, costs, sends).duration
    # With unequal stages the pipeline may take longer to become periodic; the busiest rank is a lower bound.
    busy = [0.0] * ranks
    for stage, rank in enumerate(assign_stage_ranks(name, ranks, stages_per_rank)):
        busy[rank] += sum(dataclasses.astuple(costs[stage]))
    return max(full + (microbatches - more) * (full - rest) / (more - few), microbatches * max(busy))


def bubble(
    name: str, ranks: int, stages_per_rank: int, microbatches: int, costs: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> float:
    """Returns the idle fraction of all ranks' time in a schedule, without communication.

    Args:
        costs (`tuple[float, float, float]`): time of one stage's forward, gradient of inputs and gradient of weights.
    """
    stages = [StageCosts(*costs)] * max(0, ranks * stages_per_rank)
    return simulate(name, ranks, stages_per_rank, microbatches, stages).bubble


def simulated_timeline(step: SimulatedStep, name: str, microbatches: int) -> Timeline:
    """Converts a simulated step to a `Timeline`; waiting for a neighbor is a receive, as in recorded timelines.

    Args:
        name, microbatches: as for `simulate`.
    """
    rows = []
    for row in step.spans:
        spans, clock = [], 0.0
        for _, action, start, stop in row:
            if start > clock and action.kind in _RECEIVES:
                spans.append(Span(_RECEIVES[action.kind], action.stage, action.microbatch, clock, start))
            spans.append(Span(action.kind.value, action.stage, action.microbatch, start, stop))
            clock = stop
        rows.append(spans)
    return Timeline(rows, name, len(rows), len(step.live), microbatches)

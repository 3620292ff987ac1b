"""Memory and traffic of pipeline actions: measured once per kind of action and replayed over full schedules."""

import functools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ..diagnostics.allocation_tracker import AllocationTracker
from ..pipeline_parallel import p2p
from ..pipeline_parallel.executor import Execution
from ..pipeline_parallel.schedules import Action, Kind, Plan, Schedule, assign_stage_ranks

Collectives = Mapping[tuple[str, str], tuple[int, int]]
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
# Position of a backward in its stage: the first allocates gradients that later ones accumulate into, and the last
# reduces them.
_FIRST, _BETWEEN, _LAST = "first", "between", "last"
_Key = tuple[Kind, int, str]
# Index of the microbatch whose backward is measured unsplit, in schedules that also split backwards.
_WHOLE = 2


@dataclass(frozen=True)
class ActionFigures:
    """Memory change of one action on a rank, in bytes, and its communication.

    Attributes:
        peak: peak memory while it ran, relative to its start.
        growth: memory at its end, relative to its start; negative if it frees memory.
        collectives: (group, operation) -> number of calls and bytes of their largest tensors.
    """

    peak: int
    growth: int
    collectives: Collectives = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """Peak memory of a step in bytes, and the action at the peak; `None` for a peak before or after the actions."""

    size: int
    action: Action | None


@dataclass
class StepOfActions:
    """A measured step: figures of its actions and of the time around them.

    Attributes:
        figures: for each kind of action of this rank's stages.
        microbatches: number of measured microbatches.
        before: bytes in use when the first action began.
        around: peak before the first and after the last action.
        collectives_around: as in `ActionFigures`, before the first and after the last action.
    """

    figures: dict[_Key, ActionFigures] = field(default_factory=dict)
    microbatches: int = 0
    before: int = 0
    around: int = 0
    collectives_around: Collectives = field(default_factory=dict)

    def of(self, kind: Kind, stage: int, place: str) -> ActionFigures:
        """Returns the figures of a kind of action, derived from other kinds if it was not measured itself."""
        if (kind, stage, place) in self.figures:
            return self.figures[kind, stage, place]
        # An unsplit first or last backward, measured only in halves: start from an unsplit one in between, and add the
        # difference between the halves at the two positions.
        usual = self.figures[kind, stage, _BETWEEN]
        more, less = ([self.figures[half, stage, where] for half in _HALVES] for where in (place, _BETWEEN))
        growth = sum(half.growth for half in more) - sum(half.growth for half in less)
        peak = max(usual.peak, usual.growth + growth)
        collectives = functools.reduce(_sum, (half.collectives for half in more))
        return ActionFigures(peak, usual.growth + growth, collectives)

    def moved_to(self, stages: Sequence[int]) -> "StepOfActions":
        """Returns the figures for a rank of the same kind that holds other stages, in the same order."""
        old_stages = sorted({stage for _, stage, _ in self.figures})
        other = dict(zip(old_stages, stages, strict=True))
        figures = {(kind, other[stage], first): entry for (kind, stage, first), entry in self.figures.items()}
        return replace(self, figures=figures)

    def compute_peak(self, actions: Sequence[Action]) -> Peak:
        """Returns the peak of a rank's actions, replayed in order with the measured figures."""
        total, peak = self.before, Peak(self.around, None)
        sends: deque[int] = deque()
        for action, place in _placed(actions):
            action_figures = self.of(action.kind, action.stage, place)
            if total + action_figures.peak > peak.size:
                peak = Peak(total + action_figures.peak, action)
            if action.kind in _SENDS:
                # A sent tensor is freed only after `IN_FLIGHT` further sends.
                sends.append(action_figures.growth)
                total += sends.popleft() if len(sends) > p2p.IN_FLIGHT else 0
            else:
                total += action_figures.growth
        return peak

    def sum_collectives(self, actions: Sequence[Action]) -> dict[tuple[str, str], tuple[int, int]]:
        """Sums the collectives of a rank's actions and those around them."""
        calls, sizes = _counted(self.collectives_around)
        for action, place in _placed(actions):
            action_counts = _counted(self.of(action.kind, action.stage, place).collectives)
            calls += action_counts[0]
            sizes += action_counts[1]
        return {name: (calls[name], sizes[name]) for name in sorted(calls)}


def _placed(actions: Sequence[Action]) -> Iterator[tuple[Action, str]]:
    """Yields each action and whether it is the first or last of its kind and stage; both halves count as one kind."""
    kinds = [(_HALVES[1] if action.kind is Kind.BACKWARD else action.kind, action.stage) for action in actions]
    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
    last = {kind: index for index, kind in enumerate(kinds)}
    for index, (action, kind) in enumerate(zip(actions, kinds, strict=True)):
        yield action, _FIRST if index == first[kind] else _LAST if index == last[kind] else _BETWEEN


def _counted(collectives: Collectives) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    return (
        Counter({name: calls for name, (calls, _) in collectives.items()}),
        Counter({name: size for name, (_, size) in collectives.items()}),
    )


def one_at_a_time(schedule: Schedule) -> Schedule:
    """Returns a schedule with the same stages in which each microbatch runs forward and backward before the next.

    It accepts any number of microbatches, and only one is in flight at a time.
    """

    def orders(ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
        rank_of = assign_stage_ranks(schedule.name, ranks, stages_per_rank)
        rank_actions: list[list[Action]] = [[] for _ in range(ranks)]
        for microbatch in range(microbatches):
            for stage, rank in enumerate(rank_of):
                rank_actions[rank].append(Action(Kind.FORWARD, stage, microbatch))
            # Some schedules mix split and unsplit backwards, but split the first and the last: measure one unsplit.
            kinds = _HALVES if schedule.splits_backward and microbatch != _WHOLE else (Kind.BACKWARD,)
            for stage, rank in reversed([*enumerate(rank_of)]):
                rank_actions[rank] += [Action(kind, stage, microbatch) for kind in kinds]
        return tuple(map(tuple, rank_actions))

    return replace(schedule, orders=orders, runs=lambda *_: True)


def microbatches_to_measure(schedule: Schedule) -> int:
    """Returns the number of microbatches that `StepOfActions` needs: first, last, and one of each kind in between."""
    return 4 if schedule.splits_backward else 3


@contextmanager
def measured_actions(step: StepOfActions, tracker: AllocationTracker) -> Iterator[None]:
    """Measures the actions of the step inside the context with a tracker that counts its allocations."""
    original, in_flight = Execution.do, p2p.IN_FLIGHT
    # Free each sent tensor at once, so that an action's figures do not depend on earlier sends.
    p2p.IN_FLIGHT = 0
    done: list[tuple[Action, ActionFigures]] = []
    sent: list[Collectives] = []
    most_around = [tracker.window()[1]]

    def do(execution: Execution, action: Action) -> None:
        before, most = tracker.window()
        if not done:
            step.before = before
            most_around.append(most)
        sent.append(dict(tracker.figures.collectives))
        original(execution, action)
        after, most = tracker.window()
        collectives = _difference(tracker.figures.collectives, sent[-1])
        sent[1:] = [dict(tracker.figures.collectives)]
        done.append((action, ActionFigures(most - before, after - before, collectives)))

    Execution.do = do  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Execution.do, p2p.IN_FLIGHT = original, in_flight  # type: ignore[method-assign]
    most_around.append(tracker.window()[1])
    step.around = max(most_around[1:])
    if done:
        step.collectives_around = _sum(sent[0], _difference(tracker.figures.collectives, sent[-1]))
    step.microbatches = len({action.microbatch for action, _ in done})
    for (action, place), (_, figures) in zip(_placed([action for action, _ in done]), done, strict=True):
        step.figures[action.kind, action.stage, place] = figures


def _difference(now: Collectives, before: Collectives) -> Collectives:
    delta = {}
    for name, (calls, size) in now.items():
        old_calls, old_size = before.get(name, (0, 0))
        if calls > old_calls:
            delta[name] = calls - old_calls, size - old_size
    return delta


def _sum(one: Collectives, other: Collectives) -> Collectives:
    calls, sizes = (a + b for a, b in zip(_counted(one), _counted(other), strict=True))
    return {name: (calls[name], sizes[name]) for name in calls}

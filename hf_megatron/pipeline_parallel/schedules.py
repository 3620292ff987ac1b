"""Pipeline schedules as data: the ordered computations, sends and receives of every rank.

Nothing here runs a model or needs a process group. Orders of schedules with several stages per rank come from torch.
"""

import enum
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ..compat.torch_pipelining import add_sends_and_receives, pipeline_orders
from ..errors import ConfigError


class Kind(enum.Enum):
    """Kind of an action; the values are the names that torch prints."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"

    @property
    def communicates(self) -> bool:
        """Whether the action is a send or a receive."""
        return len(self.value) > 1


@dataclass(frozen=True)
class Action:
    """One step of one rank.

    Args:
        kind (`Kind`): `BACKWARD` computes all gradients; `BACKWARD_INPUT` and, any time later, `BACKWARD_WEIGHT`
            compute them in two steps.
        stage (`int`): the stage that computes, sends (to `stage + 1` in forward, `stage - 1` in backward) or receives
            (from `stage - 1` in forward, `stage + 1` in backward).
        microbatch (`int`): index of the microbatch.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


# The actions of each rank.
Plan = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    Args:
        name (`str`): the value of `MegatronConfig.pipeline_schedule`.
        orders (`Callable`): (ranks, stages per rank, microbatches) -> computations of each rank, without communication.
        stages_per_rank (`int`, defaults to 1): default number of stages per rank.
        fixed (`int`, *optional*): the only supported number of stages per rank; `None` if any is supported.
        v_shaped (`bool`, defaults to `False`): whether stages run down the ranks and back up, so that the first rank
            holds both ends; otherwise they are assigned round-robin.
        splits_backward (`bool`, defaults to `False`): whether gradients of inputs and of weights are separate steps.
        runs (`Callable`, *optional*): (ranks, stages per rank, microbatches) -> whether the schedule supports them;
            defaults to any number of microbatches.
        rule (`str`, *optional*): `runs` in words, for errors; `{ranks}` and `{stages}` are filled in.
    """

    name: str
    orders: Callable[[int, int, int], Plan]
    stages_per_rank: int = 1
    fixed: int | None = None
    v_shaped: bool = False
    splits_backward: bool = False
    runs: Callable[[int, int, int], bool] = lambda ranks, stages_per_rank, microbatches: True
    rule: str = "1 or more"

    def resolve(self, virtual_stages: int | None) -> int:
        """Returns the number of stages per rank for `virtual_stages`; raises `ConfigError` if it is not supported."""
        count = self.stages_per_rank if virtual_stages is None else virtual_stages
        if count < 1 or self.fixed not in (None, count):
            valid = "1 or more" if self.fixed is None else f"{self.fixed} only"
            raise ConfigError(
                f"MegatronConfig.virtual_stages = {count}: pipeline_schedule = {self.name!r} takes {valid}."
            )
        return count


SCHEDULES: dict[str, Schedule] = {}


def register_schedule(schedule: Schedule, *, replace: bool = False) -> Schedule:
    """Registers a schedule under its name; raises `ConfigError` if the name is taken, unless `replace`."""
    if schedule.name in SCHEDULES and not replace:
        raise ConfigError(
            f"pipeline schedule {schedule.name!r} is registered already; pass replace=True to override it."
        )
    SCHEDULES[schedule.name] = schedule
    return schedule


def schedule(name: str) -> Schedule:
    """Returns the schedule of this name, or raises `ConfigError` with the valid names."""
    if name not in SCHEDULES:
        raise ConfigError(f"MegatronConfig.pipeline_schedule = {name!r}: expected one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]


def check_schedule(name: str, ranks: int, stages_per_rank: int, microbatches: int | None = None) -> None:
    """Raises `ConfigError` if the schedule does not support these sizes; `None` skips the check of microbatches."""
    definition = schedule(name)
    if ranks < 1:
        raise ConfigError(f"MegatronConfig.pp_size = {ranks}: expected an integer of 1 or more.")
    definition.resolve(stages_per_rank)
    if microbatches is None or (microbatches > 0 and definition.runs(ranks, stages_per_rank, microbatches)):
        return
    # Every schedule here supports multiples of the number of stages, so a valid number is within this distance.
    start = max(microbatches, 0)
    near = [
        next((count for count in numbers if definition.runs(ranks, stages_per_rank, count)), None)
        for numbers in (range(start - 1, 0, -1), range(start + 1, start + ranks * stages_per_rank + 1))
    ]
    rule = definition.rule.format(ranks=ranks, stages=ranks * stages_per_rank)
    raise ConfigError(
        f"MegatronConfig.num_microbatches = {microbatches}: pipeline_schedule = {name!r} with pp_size = {ranks} and "
        f"virtual_stages = {stages_per_rank} takes {rule}, for example "
        f"{' or '.join(str(count) for count in near if count)}."
    )


def valid_microbatches(name: str, ranks: int, stages_per_rank: int, at_most: int) -> int:
    """Returns the largest supported number of microbatches up to `at_most`, or else the smallest one above it."""
    check_schedule(name, ranks, stages_per_rank)
    definition = schedule(name)
    counts = itertools.chain(range(at_most, 0, -1), itertools.count(max(at_most, 0) + 1))
    return next(count for count in counts if definition.runs(ranks, stages_per_rank, count))


def assign_stage_ranks(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the rank of each stage: round-robin, or down and back up for V-shaped schedules."""
    check_schedule(name, ranks, stages_per_rank)
    v_shaped = schedule(name).v_shaped
    rounds = [range(ranks)[:: -1 if v_shaped and round_idx % 2 else 1] for round_idx in range(stages_per_rank)]
    return tuple(rank for one in rounds for rank in one)


def rank_actions(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the actions of every rank for one step, including sends and receives; raises as `check_schedule`."""
    check_schedule(name, ranks, stages_per_rank, microbatches)
    return _plan(schedule(name), ranks, stages_per_rank, microbatches)


def computations(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the computations of every rank for one step, without communication; raises as `check_schedule`."""
    check_schedule(name, ranks, stages_per_rank, microbatches)
    return _computations(schedule(name), ranks, stages_per_rank, microbatches)


def forward_plan(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the actions of every rank for forwards only, stage by stage, of any number of microbatches."""
    return _one_way(Kind.FORWARD, assign_stage_ranks(name, ranks, stages_per_rank), ranks, microbatches)


def backward_plan(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the actions of every rank for unsplit backwards only, in the reverse order of `forward_plan`."""
    return _one_way(Kind.BACKWARD, assign_stage_ranks(name, ranks, stages_per_rank), ranks, microbatches)


@cache
def _computations(definition: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    return definition.orders(ranks, stages_per_rank, microbatches)


@cache
def _plan(definition: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    orders = _computations(definition, ranks, stages_per_rank, microbatches)
    return _with_communication(orders, assign_stage_ranks(definition.name, ranks, stages_per_rank))


@cache
def _one_way(kind: Kind, placement: tuple[int, ...], ranks: int, microbatches: int) -> Plan:
    orders = []
    for rank in range(ranks):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        order = [Action(kind, stage, microbatch) for stage in stages for microbatch in range(microbatches)]
        orders.append(order if kind is Kind.FORWARD else order[::-1])
    return _with_communication(orders, placement)


def _with_communication(orders: Iterable[Iterable[Action]], placement: tuple[int, ...]) -> Plan:
    plain = tuple(tuple((action.kind.value, action.stage, action.microbatch) for action in order) for order in orders)
    return _actions(add_sends_and_receives(plain, placement))


def _actions(orders: tuple[tuple[tuple[str, int, int], ...], ...]) -> Plan:
    # A dict lookup is three times as fast as `Kind(value)`; planner searches do it a hundred thousand times.
    kinds = {kind.value: kind for kind in Kind}
    return tuple(tuple(Action(kinds[kind], stage, microbatch) for kind, stage, microbatch in order) for order in orders)


def _gpipe(ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return tuple(
        tuple(Action(kind, rank, microbatch) for kind in kinds for microbatch in range(microbatches))
        for rank in range(ranks)
    )


def _one_forward_one_backward(ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    orders = []
    for rank in range(ranks):
        # Warm-up: number of forwards before this rank's first backward; earlier ranks need more.
        ahead = min(ranks - 1 - rank, microbatches)
        order = [Action(Kind.FORWARD, rank, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if microbatch + ahead < microbatches:
                order.append(Action(Kind.FORWARD, rank, microbatch + ahead))
            order.append(Action(Kind.BACKWARD, rank, microbatch))
        orders.append(tuple(order))
    return tuple(orders)


def _torch_order(schedule_class: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    return _actions(pipeline_orders(schedule_class, ranks, stages_per_rank, microbatches))


_ROUNDS: dict[str, Any] = {
    "runs": lambda ranks, stages_per_rank, microbatches: microbatches % max(1, microbatches // ranks) == 0,
    "rule": "a multiple of num_microbatches // {ranks}, such as any multiple of {ranks}",
}
_FILLED: dict[str, Any] = {
    "runs": lambda ranks, stages_per_rank, microbatches: microbatches >= ranks * stages_per_rank,
    "rule": "{stages} or more",
}
_V: dict[str, Any] = {"fixed": 2, "v_shaped": True, "splits_backward": True}

register_schedule(Schedule("gpipe", _gpipe, fixed=1))
register_schedule(Schedule("1f1b", _one_forward_one_backward, fixed=1))
for _name, _class, _others in (
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", _ROUNDS),
    ("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", {**_ROUNDS, "splits_backward": True}),
    ("zbv", "ScheduleZBVZeroBubble", _V),
    ("dualpipev", "ScheduleDualPipeV", {**_V, **_FILLED}),
    ("looped_bfs", "ScheduleLoopedBFS", {}),
):
    register_schedule(Schedule(_name, partial(_torch_order, _class), stages_per_rank=2, **_others))

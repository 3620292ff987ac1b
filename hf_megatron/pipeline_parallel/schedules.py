"""Pipeline schedules as data: what every rank computes, sends and receives, and in what order.

Nothing here runs a model or needs a process group; the orders of schedules with several stages per rank are torch's.
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
    """What an action does; the values are the names torch prints."""

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
        kind (`Kind`): what is done. `BACKWARD` computes all gradients; `BACKWARD_INPUT` and, any time later,
            `BACKWARD_WEIGHT` do it in two steps.
        stage (`int`): the stage that computes, sends (to `stage + 1` forward, `stage - 1` backward) or receives (from
            `stage - 1` forward, `stage + 1` backward).
        microbatch (`int`): counted from 0.
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
        orders (`Callable`): (ranks, stages per rank, microbatches) -> what each rank computes, without communication.
        stages_per_rank (`int`, defaults to 1): stages on each rank unless the user says otherwise.
        fixed (`int`, *optional*): the only number of stages per rank that there is; `None` when any will do.
        v_shaped (`bool`, defaults to `False`): stages run down the ranks and back up, so that the first rank holds
            both ends; by default they go round.
        splits_backward (`bool`, defaults to `False`): gradients of inputs and of weights are computed in two steps.
        runs (`Callable`, *optional*): (ranks, stages per rank, microbatches) -> whether there is such a schedule; by
            default any number of microbatches will do.
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
        """Returns the stages per rank that `virtual_stages` asks for; raises `ConfigError` where it cannot."""
        count = self.stages_per_rank if virtual_stages is None else virtual_stages
        if count < 1 or self.fixed not in (None, count):
            valid = "1 or more" if self.fixed is None else f"{self.fixed} only"
            raise ConfigError(
                f"MegatronConfig.virtual_stages = {count}: pipeline_schedule = {self.name!r} takes {valid}."
            )
        return count


SCHEDULES: dict[str, Schedule] = {}


def register_schedule(schedule: Schedule, *, replace: bool = False) -> Schedule:
    """Makes a schedule available under its name; raises `ConfigError` where it is taken, unless `replace`."""
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
    """Raises `ConfigError` where no schedule exists for these sizes; `None` leaves the microbatches open."""
    found = schedule(name)
    if ranks < 1:
        raise ConfigError(f"MegatronConfig.pp_size = {ranks}: expected an integer of 1 or more.")
    found.resolve(stages_per_rank)
    if microbatches is None or (microbatches > 0 and found.runs(ranks, stages_per_rank, microbatches)):
        return
    # As many microbatches as stages, or a multiple, is right for every schedule here: one lies within this distance.
    start = max(microbatches, 0)
    near = [
        next((number for number in numbers if found.runs(ranks, stages_per_rank, number)), None)
        for numbers in (range(start - 1, 0, -1), range(start + 1, start + ranks * stages_per_rank + 1))
    ]
    rule = found.rule.format(ranks=ranks, stages=ranks * stages_per_rank)
    raise ConfigError(
        f"MegatronConfig.num_microbatches = {microbatches}: pipeline_schedule = {name!r} with pp_size = {ranks} and "
        f"virtual_stages = {stages_per_rank} takes {rule}, for example "
        f"{' or '.join(str(number) for number in near if number)}."
    )


def valid_microbatches(name: str, ranks: int, stages_per_rank: int, at_most: int) -> int:
    """Returns the most microbatches that can run, `at_most` or fewer; if it takes more, the fewest."""
    check_schedule(name, ranks, stages_per_rank)
    found = schedule(name)
    numbers = itertools.chain(range(at_most, 0, -1), itertools.count(max(at_most, 0) + 1))
    return next(number for number in numbers if found.runs(ranks, stages_per_rank, number))


def assign_stage_ranks(name: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Returns the rank that holds each stage: round and round, or down and back up for V-shaped schedules."""
    check_schedule(name, ranks, stages_per_rank)
    v_shaped = schedule(name).v_shaped
    rounds = [range(ranks)[:: -1 if v_shaped and number % 2 else 1] for number in range(stages_per_rank)]
    return tuple(rank for one in rounds for rank in one)


def rank_actions(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the actions of every rank for one step, sends and receives included; raises as `check_schedule`."""
    check_schedule(name, ranks, stages_per_rank, microbatches)
    return _plan(schedule(name), ranks, stages_per_rank, microbatches)


def computations(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns what every rank computes in one step, without sends and receives; raises as `check_schedule`."""
    check_schedule(name, ranks, stages_per_rank, microbatches)
    return _computations(schedule(name), ranks, stages_per_rank, microbatches)


def forward_plan(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the actions of every rank for forwards alone, stage by stage, of any number of microbatches."""
    return _one_way(Kind.FORWARD, assign_stage_ranks(name, ranks, stages_per_rank), ranks, microbatches)


def backward_plan(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    """Returns the actions of every rank for full backwards alone, in the reverse order of `forward_plan`."""
    return _one_way(Kind.BACKWARD, assign_stage_ranks(name, ranks, stages_per_rank), ranks, microbatches)


@cache
def _computations(found: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    return found.orders(ranks, stages_per_rank, microbatches)


@cache
def _plan(found: Schedule, ranks: int, stages_per_rank: int, microbatches: int) -> Plan:
    orders = _computations(found, ranks, stages_per_rank, microbatches)
    return _with_communication(orders, assign_stage_ranks(found.name, ranks, stages_per_rank))


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
    # An enumeration's own call takes three times as long, which a search makes a hundred thousand times.
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
        # The forwards that are on their way to the last stage and back when this rank's first backward can start.
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
    "rule": "a number that num_microbatches // {ranks} divides, as any multiple of {ranks}",
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

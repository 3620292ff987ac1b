"""Cost of a layout: memory of each pipeline rank, time of a step, and communication volume."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config import MegatronConfig
from ..pipeline_parallel.schedule_simulator import StageCosts, simulated_seconds
from ..pipeline_parallel.schedules import schedule
from .rank_memory import RankMemory
from .time_model import Times, communication_seconds, exposed_reduction, seconds
from .unit_cost_cache import UnitCostCache
from .unit_costs import Runs
from .unit_work import Work

# Bytes per entry that an AdamW step reads and writes: main weight and two moments twice, gradient, weight.
_STEP_BYTES = 2 * 12 + 4 + 2
_GRADIENT = 4
# Assumed bandwidth of AdamW in host memory, per device; not measured.
_HOST_MEMORY_GB_S = 50
# Share of the compute time above which kernel launches are reported as slow.
_NOTICED = 0.1
_EXPERTS_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


@dataclass(frozen=True)
class Estimate:
    """Cost of a layout.

    Attributes:
        layout: with its numbers of data-parallel ranks and microbatches.
        rows (`int`): samples of a microbatch.
        microbatches (`int`): of a step, on each data-parallel rank.
        memory: for each pipeline rank, category -> bytes at its peak.
        seconds (`float`): of a step.
        compute, exposed, bubble: parts of `seconds` on the rank with the most work: computation, waits per axis, and
            the pipeline bubble.
        traffic: axis -> bytes that this rank sends in a step.
        stages: seconds of a microbatch on each stage.
        send (`float`): seconds from one stage to the next.
        is_small (`bool`): whether kernel launches are a noticeable share of the computation.
    """

    layout: MegatronConfig
    rows: int
    microbatches: int
    memory: tuple[Counter[str], ...]
    seconds: float
    compute: float
    exposed: Mapping[str, float]
    bubble: float
    traffic: Mapping[str, float]
    stages: tuple[StageCosts, ...]
    send: float
    is_small: bool

    @property
    def peak(self) -> int:
        """Peak memory of the fullest rank, in bytes."""
        return max(sum(rank.values()) for rank in self.memory)


@dataclass(frozen=True)
class _StageTimes:
    """Seconds of a microbatch on each stage, and on each rank."""

    stages: tuple[StageCosts, ...]
    ranks: tuple[Times, ...]

    @property
    def slowest(self) -> int:
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)


class Estimator:
    """Estimates layouts of one job.

    Args:
        cost_cache: costs of the model's units.
    """

    def __init__(self, cost_cache: UnitCostCache):
        self.cost_cache, self.job = cost_cache, cost_cache.job
        self.memory = RankMemory(cost_cache)
        self._times: dict[tuple, _StageTimes] = {}
        self._stages: dict[tuple, tuple[StageCosts, Times]] = {}

    def quick_seconds(self, layout: MegatronConfig, rows: int, microbatches: int) -> float:
        """Returns the seconds of a step by the closed-form bubble of its schedule, assuming equal stages."""
        times = self._stage_times(layout, rows)
        most = times.ranks[times.slowest].total
        splits = schedule(layout.pipeline_schedule).splits_backward
        bubble = most * (layout.pp_size - 1) / self.memory.per_rank(layout) / (3 if splits else 1)
        return self._with_step(layout, microbatches, most * microbatches + bubble)[0]

    def estimate(self, layout: MegatronConfig, rows: int, microbatches: int) -> Estimate:
        """Estimates a step by simulating its schedule.

        Args:
            layout: with its `dp_size`.
            rows (`int`): samples of a microbatch.
            microbatches (`int`): of a step on each data-parallel rank.
        """
        times, job = self._stage_times(layout, rows), self.job
        slowest = times.slowest
        rank_times = times.ranks[slowest].repeated(microbatches)
        hidden, send, duration = self._hidden_bytes(layout, rows), 0.0, rank_times.total
        traffic = self._traffic(layout, rows, microbatches, slowest)
        if layout.pp_size > 1:
            per_rank = self.memory.per_rank(layout)
            send = communication_seconds("pp", 1, hidden, job.device, job.efficiency, self._links(layout))
            send *= job.efficiency.exposed["pp"]
            sizes = layout.pp_size, per_rank, microbatches
            duration = simulated_seconds(layout.pipeline_schedule, *sizes, times.stages, send)
            traffic["pp"] = 2.0 * hidden * microbatches * per_rank
        step_seconds, waiting, step = self._with_step(layout, microbatches, duration)
        if reduced := self._reduced_bytes(layout, microbatches):
            traffic["dp"] = reduced
        exposed = dict(rank_times.exposed) | ({"dp": waiting} if waiting else {})
        return Estimate(
            layout,
            rows,
            microbatches,
            self.memory.categories(layout, rows, microbatches),
            step_seconds,
            rank_times.compute + step,
            exposed,
            duration - rank_times.total,
            traffic,
            times.stages,
            send,
            rank_times.by_floor > _NOTICED * rank_times.compute,
        )

    def _with_step(self, layout: MegatronConfig, microbatches: int, duration: float) -> tuple[float, float, float]:
        """Returns the seconds of the step, of waiting for data-parallel ranks, and of the optimizer step."""
        device, waiting = self.job.device, 0.0
        if reduced := self._reduced_bytes(layout, microbatches):
            links, efficiency = self._links(layout), self.job.efficiency
            reduction = communication_seconds("dp", 1, reduced, device, efficiency, links)
            waiting = exposed_reduction(reduction, duration, efficiency)
        owned = max(self.memory.table(layout).owned)
        step = owned * _STEP_BYTES / (device.memory_tb_s * 1e12 * device.memory_share)
        if layout.offload_optimizer:
            # Gradients move to the host and weights back; in between, the step reads and writes host memory.
            step = owned * (_GRADIENT + self.job.itemsize) / (device.host_gb_s * 1e9)
            step += owned * _STEP_BYTES / (_HOST_MEMORY_GB_S * 1e9)
        return duration + waiting + step, waiting, step

    def _stage_times(self, layout: MegatronConfig, rows: int) -> _StageTimes:
        shape = schedule(layout.pipeline_schedule).v_shaped, self.memory.per_rank(layout)
        sizes = layout.tp_size, layout.cp_size, layout.ep_size, layout.pp_size
        # Whether an expert-parallel group stays in a link domain depends on the mesh, so its link is part of the key.
        key = *sizes, *shape, layout.recompute, rows, self._links(layout)["ep"]
        if key not in self._times:
            rank_of, links = self.memory.table(layout).rank_of, self._links(layout)
            stages = self.cost_cache.runs(len(rank_of))
            of_runs = {runs: self._stage(layout, rows, runs, links) for runs in dict.fromkeys(stages)}
            costs = tuple(of_runs[runs][0] for runs in stages)
            # Most ranks between the first and the last hold the same units: compute each kind once.
            times: dict[tuple, Times] = {}
            held_by = self.cost_cache.get_rank_runs(rank_of)
            for held in dict.fromkeys(held_by):
                times[held] = sum((of_runs[runs][1].repeated(count) for runs, count in held), Times())
            self._times[key] = _StageTimes(costs, tuple(times[held] for held in held_by))
        return self._times[key]

    def _stage(
        self, layout: MegatronConfig, rows: int, runs: Runs, links: Mapping[str, str]
    ) -> tuple[StageCosts, Times]:
        """Returns the costs of a microbatch on a stage, and the times of its forward and backward together."""
        key = layout.tp_size, layout.cp_size, layout.ep_size, layout.recompute, rows, runs, *links.values()
        if key not in self._stages:
            forward = backward = Times()
            for number, count in runs:
                one, other = (
                    seconds(work, self.job.device, self.job.efficiency, self.job.precision, links).repeated(count)
                    for work in self._unit_work(layout, rows, number)
                )
                forward, backward = forward + one, backward + other
            cost = StageCosts(forward.total, backward.total / 2, backward.total / 2)
            self._stages[key] = cost, forward + backward
        return self._stages[key]

    def _unit_work(self, layout: MegatronConfig, rows: int, unit: int) -> tuple[Work, Work]:
        figures, local_rows = self.cost_cache.costs(layout).unit(unit), rows / layout.cp_size
        # Data-parallel traffic occurs once per step and is counted separately.
        works = [_within_replica(work.scaled(local_rows)) for work in (figures.forward, figures.backward)]
        if self.job.attended != 1:
            works = [replace(work, attention=work.attention * self.job.attended) for work in works]
        if decoded := self._decoding(layout, unit):
            works = [work + decoded for work in works]
        if layout.cp_size > 1:
            ring, others = self.cost_cache.ring(layout).unit(unit), layout.cp_size - 1
            for place, work in enumerate((ring.forward, ring.backward)):
                calls, size = work.traffic.get("cp", (0, 0.0))
                # Measured with two ranks, each exchanging half of the sequence; `cp_size` ranks exchange all but their
                # own shard.
                works[place] += Work(traffic={"cp": (calls * others, size * 2 * rows * others / layout.cp_size)})
        if layout.ep_size > 1 and unit in self.cost_cache.parameters(layout).experts:
            text = self.cost_cache.short.config.get_text_config()
            chosen = next((n for name in _EXPERTS_CHOSEN if isinstance(n := getattr(text, name, None), int)), 1)
            # Token dispatch and combine, assuming equal load of the experts.
            sent = 2 * self._hidden_bytes(layout, rows) * chosen * (layout.ep_size - 1) / layout.ep_size
            works = [work + Work(traffic={"ep": (2, sent)}) for work in works]
        return works[0], works[1]

    def _decoding(self, layout: MegatronConfig, unit: int) -> Work | None:
        """Returns the work of dequantizing a unit's weights, if any; only layers have quantized weights."""
        held = () if unit < 0 else self.cost_cache.parameters(layout).layers[unit]
        coded = [one for one in held if one.codes is not None]
        if not coded:
            return None
        return Work(moved=sum((one.codes or 0) + one.entries * one.itemsize for one in coded), kernels=len(coded))

    def _hidden_bytes(self, layout: MegatronConfig, rows: int) -> float:
        """Returns the bytes of a rank's hidden states of one microbatch."""
        shared = layout.cp_size * (layout.tp_size if layout.sequence_parallel else 1)
        tokens = rows * self.job.sequence_length / shared
        return tokens * self.cost_cache.short.config.get_text_config().hidden_size * self.job.itemsize

    def _links(self, layout: MegatronConfig) -> dict[str, str]:
        device, inner = self.job.device, layout.tp_size * layout.cp_size
        # Rank order, innermost first: tp, cp, pp, dp. Expert-parallel groups use tp first, then cp, then dp.
        experts = layout.ep_size if layout.ep_size <= inner else layout.ep_size * layout.pp_size
        reach = {"tp": layout.tp_size, "cp": inner, "ep": experts, "pp": 2 * inner, "dp": self.job.devices}
        return {axis: device.connection(devices) for axis, devices in reach.items()}

    def _reduced_bytes(self, layout: MegatronConfig, microbatches: int) -> float:
        """Returns the bytes of gradients and weights that the rank with the most weights sends in a step."""
        sharing = (layout.dp_size or 1) * layout.cp_size
        table, weights = self.memory.table(layout), self.job.itemsize
        sent = max(table.trained) * (_GRADIENT * (microbatches if layout.zero_stage == 2 else 1) + weights)
        if layout.zero_stage == 3:
            # ZeRO-3 gathers weights twice per microbatch, for forward and backward.
            each = zip(table.trained, table.entries, strict=True)
            sent = microbatches * max(_GRADIENT * trained + 2 * weights * entries for trained, entries in each)
        return sent * (sharing - 1) / sharing

    def _traffic(self, layout: MegatronConfig, rows: int, microbatches: int, rank: int) -> dict[str, float]:
        traffic: dict[str, float] = {}
        table = self.memory.table(layout)
        for runs, stages in self.cost_cache.get_rank_runs(table.rank_of)[rank]:
            for unit, count in runs:
                for work in self._unit_work(layout, rows, unit):
                    for axis, (_, size) in work.traffic.items():
                        traffic[axis] = traffic.get(axis, 0.0) + size * count * stages * microbatches
        return traffic


def _within_replica(work: Work) -> Work:
    return replace(work, traffic={axis: sent for axis, sent in work.traffic.items() if axis in ("tp", "cp", "ep")})

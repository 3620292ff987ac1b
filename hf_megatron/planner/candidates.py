"""Candidate layouts of a job: all axis sizes that divide its devices, except those ruled out, with reasons."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..config import MegatronConfig
from ..core.axes import Axes
from ..errors import ConfigError
from ..pipeline_parallel.schedules import schedule
from .truncated_model import why_not_cut
from .unit_cost_cache import UnitCostCache

_ROWS = (1, 2, 4, 8, 16)
_VIRTUAL = (2, 3, 4, 5, 6, 8, 10)
# Stages per rank that are tried if no number splits the layers evenly.
_UNEVEN = (2, 4)
# Tokens per rank below which sequences are not split further.
_LEAST_TOKENS = 1024


@dataclass(frozen=True)
class Bounds:
    """Bounds of a search.

    Attributes:
        zero_stages, recomputes, schedules: values to try.
        offload_optimizer (`bool`): whether optimizer states are in host memory.
        fixed: field of `MegatronConfig` -> its value, such as `{"tp_size": 8}`.
    """

    zero_stages: tuple[int, ...] = (1, 3)
    recomputes: tuple[str | None, ...] = (None, "selective", "full")
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "zbv")
    offload_optimizer: bool = False
    fixed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A layout, its microbatch size, and the number of microbatches of a step on each data-parallel rank."""

    layout: MegatronConfig
    rows: int
    microbatches: int


class Candidates:
    """Lists the layouts of a job.

    Args:
        cost_cache: costs of the model's units.
        bounds: of the search.

    Attributes:
        reasons: reason for an exclusion -> number of excluded combinations of tp, cp, pp and ep.
    """

    def __init__(self, cost_cache: UnitCostCache, bounds: Bounds):
        self.cost_cache, self.job, self.bounds = cost_cache, cost_cache.job, bounds
        self.reasons: dict[str, int] = {}
        self._not_cut: dict[tuple[bool, bool, str], str] = {}

    def leave_out(self, reason: str) -> None:
        """Records an exclusion."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def require_possible(self) -> None:
        """Raises `ConfigError` for fixed sizes that no layout of the model and the devices has."""
        for name, size in self.bounds.fixed.items():
            if size < 1:
                raise ConfigError(f"{name} = {size}: expected 1 or more.")
            if name != "ep_size" and self.job.devices % size:
                raise ConfigError(f"{name} = {size}: does not divide {self.job.devices} devices.")
            if name == "ep_size" and size > 1 and (self.experts or 1) % size:
                kind = self.cost_cache.short.config.model_type
                has = f"{self.experts} experts, which {size} does not divide" if self.experts else "no experts"
                raise ConfigError(f"ep_size = {size}: model type {kind!r} has {has}.")

    def _allowed(self, name: str, sizes: Iterable[int]) -> list[int]:
        fixed = self.bounds.fixed.get(name)
        return [size for size in sizes if fixed in (None, size)]

    def zero_stages(self) -> tuple[int, ...]:
        """Returns the ZeRO stages that the model's weights can be loaded with."""
        quantized = self.job.training.quantized
        if quantized is None or 3 not in self.bounds.zero_stages:
            return self.bounds.zero_stages
        self.leave_out(f"zero 3: {quantized} codes cannot be sharded, and only the adapter has gradients to shard")
        return tuple(stage for stage in self.bounds.zero_stages if stage != 3)

    def tensor_sizes(self) -> list[int]:
        """Returns the tp sizes that fit into one link domain and that the model supports."""
        device, sizes = self.job.device, []
        for size in self._allowed("tp_size", _divisors(self.job.devices)):
            if size > device.devices_per_link:
                self.leave_out(
                    f"tp {size} and more: {device.name} has {device.devices_per_link} devices per link domain"
                )
                break
            if reason := self.cost_cache.why_not(MegatronConfig(tp_size=size)):
                self.leave_out(f"tp {size}: {reason}")
            elif size > 1 and (reason := self.cost_cache.why_not_sequence_parallel):
                self.leave_out(f"sequence parallelism: {reason}")
                sizes.append(size)
            else:
                sizes.append(size)
        return sizes

    def context_sizes(self) -> list[int]:
        """Returns the cp sizes that leave enough tokens per rank and that the model supports."""
        sizes = []
        for size in self._allowed("cp_size", _divisors(self.job.devices)):
            if size > 1 and self.job.sequence_length < size * _LEAST_TOKENS and "cp_size" not in self.bounds.fixed:
                break
            if self.job.sequence_length % (2 * size) and size > 1:
                self.leave_out(
                    f"cp {size}: the sequence length {self.job.sequence_length} is not a multiple of {2 * size}"
                )
            elif size > 1 and (reason := self.cost_cache.why_not(MegatronConfig(cp_size=size))):
                self.leave_out(f"cp {size}: {reason}")
            else:
                sizes.append(size)
        return sizes

    def expert_sizes(self, tp: int, cp: int, dp: int) -> list[int]:
        """Returns the ep sizes that the mesh supports and that divide the experts."""
        experts = self.experts
        if not experts:
            return [1]
        sizes = []
        for size in self._allowed("ep_size", _divisors(experts)):
            if size > tp * cp * dp:
                break
            if size > 1 and not _exist(MegatronConfig(tp_size=tp, cp_size=cp, dp_size=dp, ep_size=size)):
                continue
            sizes.append(size)
        return sizes

    @property
    def experts(self) -> int:
        """Number of experts of a layer; 0 without any."""
        text = self.cost_cache.short.config.get_text_config()
        names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
        return next((value for name in names if isinstance(value := getattr(text, name, None), int) and value > 1), 0)

    def meshes(self) -> Iterator[MegatronConfig]:
        """Yields the axis sizes that fit the devices, without schedule, microbatch size, and ZeRO stage."""
        layers = len(self.cost_cache.short.layers)
        tensor, context = self.tensor_sizes(), self.context_sizes()
        for tp in tensor:
            for cp in context:
                for pp in self._allowed("pp_size", _divisors(self.job.devices)):
                    inner = tp * cp * pp
                    if self.job.devices % inner:
                        continue
                    if reason := self._why_not_cut(tp, pp):
                        self.leave_out(f"pp: {reason}")
                        continue
                    if pp > layers:
                        self.leave_out(f"pp {pp}: the model has {layers} layers")
                        continue
                    dp = self.job.devices // inner
                    if self.job.global_batch % dp:
                        self.leave_out(f"dp {dp}: does not divide the global batch size {self.job.global_batch}")
                        continue
                    for ep in self.expert_sizes(tp, cp, dp):
                        yield MegatronConfig(
                            tp_size=tp,
                            sequence_parallel=self.cost_cache.shares_sequences(tp),
                            cp_size=cp,
                            pp_size=pp,
                            dp_size=dp,
                            ep_size=ep,
                            offload_optimizer=self.bounds.offload_optimizer,
                        )

    def _why_not_cut(self, tp: int, pp: int, schedule: str = "1f1b") -> str:
        if pp == 1:
            return ""
        if self.cost_cache.short.config.is_encoder_decoder:
            return "communication from the encoder to the decoder is not estimated"
        # The reason does not depend on how many tp or pp ranks there are, beyond two.
        key = self.cost_cache.shares_sequences(tp), tp > 1, schedule
        if key not in self._not_cut:
            layout = MegatronConfig(tp_size=min(tp, 2), sequence_parallel=key[0], pp_size=2, pipeline_schedule=schedule)
            self._not_cut[key] = why_not_cut(self.cost_cache.short, layout)
        return self._not_cut[key]

    def steps(self, mesh: MegatronConfig) -> Iterator[Candidate]:
        """Yields the schedules and microbatch sizes of a mesh whose ZeRO stage and recomputation are set.

        Smaller microbatches come first; `num_microbatches` of the layouts is not set yet.
        """
        samples_on_rank = self.job.global_batch // (mesh.dp_size or 1)
        splits = [(rows, samples_on_rank // rows) for rows in _ROWS if samples_on_rank % rows == 0]
        if mesh.pp_size == 1:
            yield from (Candidate(mesh, rows, microbatches) for rows, microbatches in splits)
            return
        for name in self.bounds.schedules:
            yield from self._schedules(mesh, name, splits)

    def _schedules(self, mesh: MegatronConfig, name: str, splits: list[tuple[int, int]]) -> Iterator[Candidate]:
        pipeline_schedule, layers = schedule(name), len(self.cost_cache.short.layers)
        if pipeline_schedule.splits_backward and mesh.zero_stage == 3:
            return
        if self._why_not_cut(mesh.tp_size, mesh.pp_size, name):
            return
        even = [virtual for virtual in _VIRTUAL if layers % (mesh.pp_size * virtual) == 0] or _UNEVEN
        for virtual in even if pipeline_schedule.fixed is None else (pipeline_schedule.fixed,):
            if mesh.pp_size * virtual > layers:
                continue
            stated = None if virtual == pipeline_schedule.stages_per_rank else virtual
            layout = replace(mesh, pipeline_schedule=name, virtual_stages=stated)
            for rows, microbatches in splits:
                if microbatches >= mesh.pp_size and pipeline_schedule.runs(mesh.pp_size, virtual, microbatches):
                    yield Candidate(layout, rows, microbatches)


def _exist(layout: MegatronConfig) -> bool:
    """Returns whether the ranks of a layout form a valid mesh."""
    try:
        Axes.of(layout, 0)
    except ConfigError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

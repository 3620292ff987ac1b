"""Cache of unit costs for the layouts of a search: measured once for each way to split the units."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..config import MegatronConfig
from ..core.axes import Axes
from ..data_parallel.memory_model import LocalParameter, gradient_bytes, kept_bytes
from ..errors import MegatronError
from ..models.layer_cost import estimate_cost
from ..pipeline_parallel.layers_per_stage import share_out
from .job import Job
from .local_parameters import UnitParameters, plan_unit_parameters
from .predicted_step import StepSizes
from .truncated_model import ShortModel, without_pipeline
from .unit_costs import AFTER_LAYERS, BEFORE_LAYERS, Runs, UnitCosts, measure_units
from .unit_tracker import UnitFigures

_SHARED = ("dp", "dp_cp", "edp")
# Units with unsharded weights at the same time under ZeRO-3: the current one and the next.
_GATHERED_UNITS = 2


@dataclass(frozen=True)
class KeptUnit:
    """Memory of a unit on a rank between steps.

    Attributes:
        kept: category -> bytes.
        gradients (`int`): gradient bytes of the rank's optimizer shard.
        entries (`int`): entries of its local weights.
        trained (`int`): number of these with gradients.
        owned (`float`): number of these in the rank's optimizer shard.
        largest: weight bytes of the largest units, as many as are gathered at a time.
        decoded (`int`): bytes of the largest quantized weight after dequantization.
    """

    kept: Counter[str]
    gradients: int
    entries: int
    trained: int
    owned: float
    largest: tuple[int, ...]
    decoded: int

    def repeated(self, times: int) -> "KeptUnit":
        """Returns the memory of `times` such units."""
        return KeptUnit(
            Counter({category: size * times for category, size in self.kept.items()}),
            self.gradients * times,
            self.entries * times,
            self.trained * times,
            self.owned * times,
            (self.largest * _GATHERED_UNITS)[:_GATHERED_UNITS] if times > 1 else self.largest,
            self.decoded,
        )

    def __add__(self, other: "KeptUnit") -> "KeptUnit":
        return KeptUnit(
            self.kept + other.kept,
            self.gradients + other.gradients,
            self.entries + other.entries,
            self.trained + other.trained,
            self.owned + other.owned,
            tuple(sorted((*self.largest, *other.largest), reverse=True)[:_GATHERED_UNITS]),
            max(self.decoded, other.decoded),
        )


def _more_bytes(one: UnitFigures, other: UnitFigures, shared: int) -> tuple[int, int, int]:
    """Returns the additional kept and peak bytes of a layer, forward and backward, summed over `shared` ranks."""
    names = "forward_growth", "forward_peak", "backward_peak"
    growth, forward, backward = (shared * (getattr(one, name) - getattr(other, name)) for name in names)
    return growth, forward, backward


def _with_bytes(layer: UnitFigures, more: tuple[int, int, int], shared: int) -> UnitFigures:
    growth, forward, backward = (size // shared for size in more)
    return replace(
        layer,
        forward_growth=layer.forward_growth + growth,
        forward_peak=layer.forward_peak + forward,
        backward_growth=layer.backward_growth - growth,
        backward_peak=layer.backward_peak + backward,
    )


class UnitCostCache:
    """Costs and parameters of a short model's units, by layout.

    Args:
        short: the truncated model.
        job: its units are measured with one sequence of the job's length.
    """

    def __init__(self, short: ShortModel, job: Job):
        self.short, self.job = short, job
        self._costs: dict[tuple[int, int, str | None], UnitCosts] = {}
        # For each layer: additional bytes of token dispatch to experts, for all tokens of a sequence on one rank.
        self._dispatched: tuple[tuple[int, int, int], ...] | None = None
        self._made: dict[tuple[int, bool, str | None], UnitCosts] = {}
        self._parameters: dict[tuple, UnitParameters] = {}
        self._kept: dict[tuple, tuple[dict[int, KeptUnit], KeptUnit]] = {}
        self._partitions: dict[int, tuple[int, ...]] = {}
        self._runs: dict[int, tuple[Runs, ...]] = {}
        self._of_ranks: dict[tuple[int, ...], tuple[tuple[tuple[Runs, int], ...], ...]] = {}

    def measure(
        self,
        tp_sizes: Iterable[int],
        cp_sizes: Iterable[int],
        recomputes: Iterable[str | None],
        *,
        dispatches: bool = False,
        on_smallest: Iterable[str] = (),
    ) -> None:
        """Measures the units under all these settings; raises `RankError` if one does not run.

        Args:
            recomputes: values of `MegatronConfig.recompute`; `"full"` is derived from the run without recomputation.
            dispatches (`bool`): whether experts may be sharded over ranks, which adds token dispatch.
            on_smallest: further values of `recomputes`, with the smallest tp size only.
        """
        modes = sorted({None if mode == "full" else mode for mode in recomputes} | {None}, key=str)
        keys = [(tp, cp, mode) for tp in sorted(tp_sizes) for cp in sorted(cp_sizes) for mode in modes]
        smallest = min(tp_sizes)
        keys += [(smallest, 1, mode) for mode in on_smallest]
        # Recomputation does not change the traffic of context parallelism.
        keys = [key for key in keys if key not in self._costs and (key[1] == 1 or key[2] is None)]
        layouts = [
            # Two data-parallel ranks, so that persistent gradient buffers exist before the step.
            MegatronConfig(
                tp_size=tp, sequence_parallel=self.shares_sequences(tp), cp_size=cp, dp_size=2, recompute=mode
            )
            for tp, cp, mode in keys
        ]
        if dispatches and self._dispatched is None:
            shares = self.shares_sequences(smallest)
            layouts.append(MegatronConfig(tp_size=smallest, sequence_parallel=shares, dp_size=2, ep_size=2))
        sizes = StepSizes(1, self.job.sequence_length, self.job.dtype, target_length=self.job.target_length)
        costs = measure_units(self.short, layouts, sizes, self.job.training)
        self._costs |= dict(zip(keys, costs, strict=False))
        if len(costs) > len(keys):
            plain = self._costs[smallest, 1, None].layers
            shared = smallest if self.shares_sequences(smallest) else 1
            more = zip(costs[-1].layers, plain, strict=True)
            self._dispatched = tuple(_more_bytes(one, other, shared) for one, other in more)

    def shares_sequences(self, tp_size: int) -> bool:
        """Returns whether tp ranks use sequence parallelism, which is wherever the model supports it."""
        return tp_size > 1 and not self.why_not_sequence_parallel

    @functools.cached_property
    def why_not_sequence_parallel(self) -> str:
        """Reason why the model does not support sequence parallelism; empty if it does."""
        return self.why_not(MegatronConfig(tp_size=2, sequence_parallel=True))

    def costs(self, layout: MegatronConfig) -> UnitCosts:
        """Returns the costs of units for one sequence on a rank that has all of its tokens."""
        measured = layout.tp_size, 1, None if layout.recompute == "full" else layout.recompute
        key = layout.tp_size, layout.ep_size > 1, layout.recompute
        if key not in self._made:
            costs = self._costs[measured]
            shared = layout.tp_size if self.shares_sequences(layout.tp_size) else 1
            if layout.ep_size > 1 and self._dispatched is not None:
                # The memory of token dispatch grows with the number of local tokens.
                layers = zip(costs.layers, self._dispatched, strict=True)
                costs = replace(costs, layers=tuple(_with_bytes(layer, more, shared) for layer, more in layers))
            if layout.recompute == "full":
                width = self.short.config.get_text_config().hidden_size
                costs = costs.recomputed(self.job.sequence_length * width * self.job.itemsize // shared)
            self._made[key] = costs
        return self._made[key]

    def ring(self, layout: MegatronConfig) -> UnitCosts:
        """Returns the costs with two context-parallel ranks, for their traffic."""
        return self._costs[layout.tp_size, 2, None]

    def parameters(self, layout: MegatronConfig) -> UnitParameters:
        """Returns the local parameters of units; raises `MegatronError` if the layout does not fit the model."""
        key = layout.tp_size, layout.sequence_parallel, layout.cp_size, layout.ep_size, layout.etp_size or 1
        if key not in self._parameters:
            flat, training = without_pipeline(layout), self.job.training
            self._parameters[key] = plan_unit_parameters(self.short, flat, self.job.itemsize, training)
        return self._parameters[key]

    def why_not(self, layout: MegatronConfig) -> str:
        """Returns why a layout does not fit the model; empty if it does."""
        try:
            self.parameters(layout)
        except MegatronError as error:
            return str(error)
        return ""

    def kept(self, layout: MegatronConfig) -> tuple[dict[int, KeptUnit], KeptUnit]:
        """Returns the memory of each unit between steps, and of the weights that the last unit ties to the first."""
        sizes = layout.tp_size, layout.cp_size, layout.pp_size, layout.dp_size, layout.ep_size, layout.etp_size
        key = *sizes, layout.zero_stage, layout.offload_optimizer
        if key not in self._kept:
            axes = Axes.of(layout, 0)
            shards = {name: axes.size(f"{name}_shard") for name in _SHARED}
            held = self.parameters(layout)

            def unit(parameters: Iterable[LocalParameter]) -> KeptUnit:
                param_list = [*parameters]
                trained = [one for one in param_list if one.is_trained]
                return KeptUnit(
                    Counter(kept_bytes(param_list, layout.zero_stage, shards, offloads=layout.offload_optimizer)),
                    gradient_bytes(param_list, shards),
                    sum(one.entries for one in param_list),
                    sum(one.entries for one in trained),
                    sum(one.entries / shards[one.average] for one in trained),
                    (sum(one.entries * one.itemsize for one in param_list),),
                    max((one.entries * one.itemsize for one in param_list if one.codes is not None), default=0),
                )

            units = {BEFORE_LAYERS: unit(held.before), AFTER_LAYERS: unit(held.after)}
            layers = zip(held.layers, self.costs(layout).adapters, strict=True)
            units |= {number: unit((*layer, *adapters)) for number, (layer, adapters) in enumerate(layers)}
            self._kept[key] = units, unit(held.tied)
        return self._kept[key]

    def partition(self, stages: int) -> tuple[int, ...]:
        """Returns the number of layers of each stage, as in loading; raises `ConfigError` for too many stages."""
        if stages not in self._partitions:
            model, text = self.short.model, self.short.model.config.get_text_config()
            costs = [
                sum(estimate_cost(model.get_submodule(name), text) for name in names) for names in self.short.names
            ]
            self._partitions[stages] = share_out(model, [costs[layer] for layer in self.short.layers], stages)
        return self._partitions[stages]

    def get_rank_runs(self, rank_of: tuple[int, ...]) -> tuple[tuple[tuple[Runs, int], ...], ...]:
        """Returns for each rank the distinct stages that it holds, and the number of each.

        Args:
            rank_of: rank of each stage.
        """
        if rank_of not in self._of_ranks:
            counters: list[Counter[Runs]] = [Counter() for _ in range(max(rank_of) + 1)]
            for rank, runs in zip(rank_of, self.runs(len(rank_of)), strict=True):
                counters[rank][runs] += 1
            self._of_ranks[rank_of] = tuple(tuple(counts.items()) for counts in counters)
        return self._of_ranks[rank_of]

    def runs(self, stages: int) -> tuple[Runs, ...]:
        """Returns the units of each stage; raises `ConfigError` for too many stages."""
        if stages not in self._runs:
            stage_runs, start = [], 0
            for stage, count in enumerate(self.partition(stages)):
                row = self.short.layers[start : start + count]
                start += count
                layers = [(layer, len([*same])) for layer, same in itertools.groupby(row)]
                before = [(BEFORE_LAYERS, 1)] if stage == 0 else []
                after = [(AFTER_LAYERS, 1)] if stage == stages - 1 else []
                stage_runs.append((*before, *layers, *after))
            self._runs[stages] = tuple(stage_runs)
        return self._runs[stages]

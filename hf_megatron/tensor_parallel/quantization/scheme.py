"""Quantization of a model's linears, shard by shard, as weights are read or once all of them are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.torch_dtensor import local_tensor
from ...core.axes import Axes
from ...core.mesh import ParallelMesh
from ...core.placement import Placement, count_shared_copies
from ...core.quantized_weight import QuantizedWeight
from ...errors import UnsupportedError
from ...parallel_state import ParallelState

NAME = "quantized"


@dataclass(frozen=True)
class WeightShard:
    """Local shard of a linear's weight.

    Attributes:
        shape: of the full weight.
        ranges: intervals `[start, stop)` of rows and of columns that this rank has.
        group (*optional*): the ranks that split the weight.
    """

    shape: tuple[int, int]
    ranges: Sequence[Sequence[tuple[int, int]]]
    group: dist.ProcessGroup | None

    @property
    def is_replicated(self) -> bool:
        return self.group is None

    @property
    def lacks_columns(self) -> bool:
        return sum(stop - start for start, stop in self.ranges[1]) < self.shape[1]


class Scheme(Protocol):
    """Quantization scheme of a matrix."""

    @property
    def mixes_tokens(self) -> str | None:
        """Reason why samples or tokens of one call cannot be computed separately; `None` if they can."""

    def misfit(self, part: WeightShard) -> str | None:
        """Returns why a shard's codes would differ from those codes in the full weight; `None` if they do not."""

    def waits(self, part: WeightShard) -> bool:
        """Returns whether quantizing needs a collective over the ranks that split the weight."""

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a shard `[local out, local in]` in quantized form."""

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Adds what a quantized weight lacks, with a collective over the ranks that split it."""


class Quantization:
    """Quantized linears of one model, by name.

    Args:
        settings: the user's quantization settings, as text for errors.
        linears: names of modules.
    """

    def __init__(self, scheme: Scheme, settings: str, linears: Iterable[str]):
        self.scheme, self.settings = scheme, settings
        self.linears = frozenset(linears)

    def require_fit(self, model: nn.Module, state: ParallelState) -> None:
        """Raises `UnsupportedError` for linears whose shards cannot be quantized like the full weight."""
        if state.shards_weights:
            raise UnsupportedError(
                f"{self.settings} with zero_stage = {state.config.zero_stage}: FSDP2 would shard the quantized weights "
                "without their scales. Set zero_stage=2; only the adapter has gradients and optimizer states to shard."
            )
        if self.scheme.mixes_tokens is not None and max(state.axes.size("pp"), state.axes.size("cp")) > 1:
            raise UnsupportedError(
                f"{self.settings} with pp_size = {state.axes.size('pp')}, cp_size = {state.axes.size('cp')}: "
                f"{self.scheme.mixes_tokens}"
            )
        for name in sorted(self.linears & {name for name, _ in model.named_modules()}):
            sharding = state.shardings.get(f"{name}.weight")
            if sharding is None:
                continue
            reason = self.scheme.misfit(_part(sharding.shape, sharding.placement, state.axes, None))
            if reason is not None:
                raise UnsupportedError(
                    f"{self.settings}: {name}.weight {list(sharding.shape)} over tp_size = {state.axes.size('tp')}: "
                    f"{reason} Choose another tp_size, exclude the module in the quantization config, or use pp or dp "
                    "instead of tp."
                )

    def take(self, model: nn.Module, name: str, state: ParallelState, *, is_last: bool = False) -> None:
        """Quantizes a loaded weight; one that needs a collective is left for the call with `is_last`."""
        module_name, _, param_name = name.rpartition(".")
        if param_name != "weight" or module_name not in self.linears:
            return
        module = model.get_submodule(module_name)
        weight: Any = module._parameters.get(param_name)
        if weight is None or weight.device.type == "meta" or isinstance(weight, QuantizedWeight):
            return
        sharding = state.shardings[name]
        part = _part(sharding.shape, sharding.placement, state.axes, state.mesh)
        # Local shard [local out, local in] -> codes; `entries` counts the full weight's.
        if is_last or not self.scheme.waits(part):
            quantized = self.scheme.quantize(local_tensor(weight).detach(), part)
            quantized._is_hf_initialized = True  # type: ignore[attr-defined]
            quantized.entries = sharding.shape[0] * sharding.shape[1]
            module._parameters[param_name] = quantized

    def finish(self, model: nn.Module, state: ParallelState) -> None:
        """Quantizes the remaining weights; collective."""
        for name in sorted(self.linears & {name for name, _ in model.named_modules()}):
            self.take(model, f"{name}.weight", state, is_last=True)
            weight = model.get_submodule(name)._parameters.get("weight")
            if isinstance(weight, QuantizedWeight):
                sharding = state.shardings[f"{name}.weight"]
                self.scheme.complete(weight, _part(sharding.shape, sharding.placement, state.axes, state.mesh))


def _part(shape: Sequence[int], placement: Placement, axes: Axes, mesh: ParallelMesh | None) -> WeightShard:
    out, width = shape
    is_split = placement.on(axes).is_split
    group = mesh.tp_group if is_split and mesh is not None else None
    return WeightShard((out, width), placement.intervals(shape, axes), group)


@torch.no_grad()
def dequantize_linears(model: nn.Module, state: ParallelState, dtype: torch.dtype) -> None:
    """Replaces quantized weights by weights of `dtype`, with the same sharding as without quantization."""
    copies = count_shared_copies(state.shardings.values(), state.axes)
    for name, module in model.named_modules():
        for param_name, weight in module._parameters.items():
            if not isinstance(weight, QuantizedWeight):
                continue
            sharding = state.shardings[f"{name}.{param_name}"]
            # [local out, local in], wrapped as the DTensor that the weight would be without quantization.
            local: Tensor = weight.dequantized().to(dtype)
            if state.axes.size("tp") > 1 or sharding.placement.is_split:
                local = DTensor.from_local(
                    local,
                    state.mesh.of(sharding.placement, copies),
                    sharding.placement.dtensor_placements(state.axes, copies),
                    run_check=False,
                    shape=torch.Size(sharding.shape),
                    stride=(sharding.shape[1], 1),
                )
            module._parameters[param_name] = nn.Parameter(local, requires_grad=False)
            vars(module).pop("compute_dtype", None)
    state.placed.pop(NAME)
    assert state.data_parallel is not None
    state.data_parallel.scan()

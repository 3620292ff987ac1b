"""What quantises the linears of a model, each rank its part, while weights are read or when they all are."""

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
from ...core.placement import Placement, copies_of_model
from ...core.quantized_weight import QuantizedWeight
from ...errors import UnsupportedError
from ...parallel_state import ParallelState

NAME = "quantized"


@dataclass(frozen=True)
class WeightShard:
    """A rank's part of a linear's weight.

    Attributes:
        shape: of the whole.
        ranges: of rows and of columns that this rank has, `[start, stop)`.
        group (*optional*): the ranks that have the rest of it.
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
    """A way to quantise a matrix."""

    @property
    def mixes_tokens(self) -> str | None:
        """Says why rows and tokens of one call cannot be computed by themselves; `None` if they can."""

    def misfit(self, part: WeightShard) -> str | None:
        """Says why the codes of a part would not be those of the whole; `None` if they are."""

    def waits(self, part: WeightShard) -> bool:
        """Tells whether ranks that have the rest of a weight have to be asked before it is quantised."""

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a part `[local out, local in]` in few bits."""

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Asks ranks that have the rest of a weight for what it still lacks."""


class Quantization:
    """The linears of one model that are quantised, by name.

    Args:
        settings: what the user has asked for, in words.
        linears: names of modules.
    """

    def __init__(self, scheme: Scheme, settings: str, linears: Iterable[str]):
        self.scheme, self.settings = scheme, settings
        self.linears = frozenset(linears)

    def require_fit(self, model: nn.Module, state: ParallelState) -> None:
        """Raises `UnsupportedError` for linears whose parts cannot be quantised as the whole is."""
        if state.shards_weights:
            raise UnsupportedError(
                f"{self.settings} with zero_stage = {state.config.zero_stage}: FSDP2 cuts rows out of codes and loses "
                "their scales. Set zero_stage=2; only the adapter has gradients and moments to share out."
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
                    f"{reason} Choose another tp_size, name the module in the config's modules that are left out, or "
                    "split the model over pp or dp."
                )

    def take(self, model: nn.Module, name: str, state: ParallelState, *, is_last: bool = False) -> None:
        """Quantises a weight that was read, unless other ranks must be asked first, which waits for the last call."""
        module_name, _, own = name.rpartition(".")
        if own != "weight" or module_name not in self.linears:
            return
        module = model.get_submodule(module_name)
        weight: Any = module._parameters.get(own)
        if weight is None or weight.device.type == "meta" or isinstance(weight, QuantizedWeight):
            return
        sharding = state.shardings[name]
        part = _part(sharding.shape, sharding.placement, state.axes, state.mesh)
        if is_last or not self.scheme.waits(part):
            found = self.scheme.quantize(local_tensor(weight).detach(), part)
            found._is_hf_initialized = True  # type: ignore[attr-defined]
            found.entries = sharding.shape[0] * sharding.shape[1]
            module._parameters[own] = found

    def finish(self, model: nn.Module, state: ParallelState) -> None:
        """Quantises what is left; every rank calls it."""
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
    """Puts weights of a dtype in the place of quantised ones, lying as they would have without."""
    copies = copies_of_model(state.shardings.values(), state.axes)
    for name, module in model.named_modules():
        for own, weight in module._parameters.items():
            if not isinstance(weight, QuantizedWeight):
                continue
            sharding = state.shardings[f"{name}.{own}"]
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
            module._parameters[own] = nn.Parameter(local, requires_grad=False)
            vars(module).pop("compute_dtype", None)
    state.placed.pop(NAME)
    assert state.data_parallel is not None
    state.data_parallel.scan()

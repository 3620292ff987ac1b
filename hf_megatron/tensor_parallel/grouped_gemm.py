"""Width check of experts on a rank: torch's grouped matmul requires rows that are multiples of 16 bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat.shared import Shared
from ..compat.transformers_models import uses_grouped_product
from ..core.axes import Axes
from ..core.forward_hooks import ForwardHooks
from ..core.placement import ParameterSharding
from ..errors import ConfigError

_BYTES = 16


@dataclass(frozen=True)
class SplitWidth:
    """Split dim of an expert's weight.

    Attributes:
        name: of the parameter.
        unsharded: full size of the dim.
        local: its size on each tp rank.
    """

    name: str
    unsharded: int
    local: tuple[int, ...]

    def fits(self, dtype: torch.dtype) -> bool:
        return all(width * dtype.itemsize % _BYTES == 0 for width in self.local)


def split_widths(shardings: Iterable[ParameterSharding], axes: Axes) -> tuple[SplitWidth, ...]:
    """Returns the split dims of a module's 3-dim parameters, `[experts, rows, columns]`."""
    tp_ranks = [axes.of_rank(rank) for rank in axes.ranks("tp")]
    return tuple(
        SplitWidth(
            sharding.name,
            sharding.shape[split.dim],
            tuple(sharding.placement.local_shape(sharding.shape, seen)[split.dim] for seen in tp_ranks),
        )
        for sharding in shardings
        if len(sharding.shape) == 3
        for split in sharding.placement.splits
        if split.axis == "tp"
    )


def require_expert_widths(model: nn.Module, shardings: Mapping[str, ParameterSharding], axes: Axes) -> None:
    """Raises `ConfigError` if experts of a planned model would have widths that their matmul does not support."""
    for name, module in model.named_modules():
        if uses_grouped_product(module):
            param_shardings = [shardings[f"{name}.{parameter}"] for parameter in module._parameters]
            _require(module, split_widths(param_shardings, axes), next(module.parameters()).dtype, axes.size("tp"))


class GroupedWidths(Shared):
    """Hook of experts that checks their widths again, after a cast or a change of the matmul implementation."""

    def __init__(self, widths: tuple[SplitWidth, ...], tp_size: int):
        self.widths, self.tp_size = widths, tp_size
        self.seen: torch.dtype | None = None

    def install(self, experts: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(experts, "expert widths", self._enter)

    def _enter(self, experts: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        dtype = next(iter(experts._parameters.values())).dtype  # type: ignore[union-attr]
        # Under torch.compile, only bfloat16 uses torch's grouped matmul.
        if dtype == self.seen or (torch.compiler.is_compiling() and dtype != torch.bfloat16):
            return
        if uses_grouped_product(experts):
            _require(experts, self.widths, dtype, self.tp_size)
            self.seen = dtype


def _require(experts: Any, widths: tuple[SplitWidth, ...], dtype: torch.dtype, tp_size: int) -> None:
    odd = sorted((width for width in widths if not width.fits(dtype)), key=lambda width: width.unsharded)
    if not odd:
        return
    entries, first = _BYTES // dtype.itemsize, odd[0]
    fields = [name for name, value in experts.config.to_dict().items() if value == first.unsharded and "inter" in name]
    # Smaller tp sizes that would work, for the error message.
    sizes = [
        size
        for size in range(1, tp_size)
        if all(width.unsharded % size == 0 and width.unsharded // size % entries == 0 for width in odd)
    ]
    raise ConfigError(
        f"MegatronConfig.tp_size = {tp_size}: {first.name} has width {first.unsharded}"
        + (f" (config.{fields[0]})" if fields else "")
        + f" and a rank's shard {min(first.local)}, but experts_implementation='grouped_mm' needs a multiple of "
        f"{entries} with {dtype}. Load the model with experts_implementation='eager' or 'batched_mm'"
        + (f", or with a tp_size in {sizes}." if len(sizes) > 1 else ".")
    )

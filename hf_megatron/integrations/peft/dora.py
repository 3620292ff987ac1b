"""DoRA on sharded linears: row norms of a weight whose entries may lie on several ranks.

    output = base + (m / n - 1) base + m / n s B A x        n = ||W + s B A|| of each row, no gradient

`base` is without the bias. A column-parallel linear holds full rows; a row-parallel linear holds some columns of each
row.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...tensor_parallel.local_parameters import local_view
from .factors import Factors
from .site import Site


class ShardedDora(nn.Module):
    """Replaces PEFT's `DoraLinearLayer`: `[..., in]` -> update of the base output `[..., out]`."""

    weight: nn.Parameter
    fan_in_fan_out: bool
    # Ranks that hold different columns of the same rows.
    norm_group: dist.ProcessGroup | None
    # Ranks over which the magnitude's gradient is summed.
    gradient_group: dist.ProcessGroup | None

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: Any,  # noqa: N803 - PEFT's names
        lora_B: Any,  # noqa: N803
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        magnitude = local_view(self.weight, self.gradient_group)
        assert magnitude is not None
        # The norm has no gradient, as in PEFT: only the magnitude and the two factors train.
        scale = magnitude / self._norms(lora_A, lora_B, scaling, base_layer)
        base_result = base_layer(x) if base_result is None else base_result
        bias = local_view(base_layer.bias)
        base_result = base_result if bias is None else base_result - bias
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling

    @torch.no_grad()
    def _norms(self, first: Any, second: Any, scaling: float, base_layer: Any) -> Tensor:
        """Returns the row norms `[local out]`."""
        weight, a, b = local_view(base_layer.weight), local_view(first.weight), local_view(second.weight)
        assert weight is not None and a is not None and b is not None
        rows = (weight.t() if self.fan_in_fan_out else weight) + scaling * (b @ a)
        if self.norm_group is None:
            return torch.linalg.norm(rows, dim=1)
        # Row-parallel: each rank has some columns, so sum the squares `[out]` over tp in fp32.
        squares = rows.float().pow(2).sum(1)
        dist.all_reduce(squares, group=self.norm_group)
        return squares.sqrt().to(rows.dtype)


def shard_dora(tuner: Any, adapter: str, factors: Factors | None, site: Site) -> None:
    """Shards the magnitudes of an adapter, if it uses DoRA."""
    if adapter not in tuner.lora_magnitude_vector:
        return
    layer, inner = tuner.lora_magnitude_vector[adapter], f"lora_magnitude_vector.{adapter}.weight"
    if factors is None:
        site.replicate_value(layer, "weight", inner)
        return
    if factors.b.has("gather_output"):
        raise UnsupportedError(
            f"LoraConfig.use_dora is not supported on {site.name}: each rank holds some rows of its weight and gathers "
            "the full output. Remove it from target_modules, or load the model with tp_size=1."
        )
    site.place(layer, "weight", inner, factors.b.along(0), factors.b.rule)
    if site.is_off_stage:
        return
    mesh, copies = site.state.mesh, factors.b.rule.copies
    layer.__class__ = _on_parts(type(layer))
    layer.norm_group = mesh.tp_group if factors.a.weight.is_split else None
    layer.gradient_group = None
    if factors.b.rule.sum is not None:
        layer.gradient_group = mesh.tp_group if copies is None else mesh.copies_group(copies)


def _on_parts(base: type) -> type:
    return type(base.__name__, (ShardedDora, base), {})

"""bitsandbytes' 4-bit weights (NF4, FP4): blocks of 64 entries, counted along the rows, have one scale each.

A shard has the blocks of the full weight if it begins and ends at block boundaries. Double quantization stores the
scales in 8 bits, relative to their mean: the ranks exchange the full weight's scales and keep the resulting values.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.quantized_weight import QuantizedWeight
from .scheme import WeightShard

_BLOCK = 64
# Entries per block of the scales, in double quantization.
_OUTER_BLOCK = 256


@dataclass(frozen=True)
class FourBit:
    """Scheme of `BitsAndBytesConfig(load_in_4bit=True)`."""

    kind: str
    compute_dtype: torch.dtype | None
    is_double: bool
    storage: torch.dtype
    mixes_tokens = None

    def misfit(self, part: WeightShard) -> str | None:
        """Returns which incomplete block a rank would have; `None` if it has full blocks only."""
        width = part.shape[1]
        [*columns] = part.ranges[1]
        if part.lacks_columns and (width % _BLOCK or any(edge % _BLOCK for both in columns for edge in both)):
            held = sum(stop - start for start, stop in columns)
            return (
                f"quantization blocks have {_BLOCK} entries of a row, but this rank has {held} of its {width} entries."
            )
        if any(edge * width % _BLOCK for both in part.ranges[0] for edge in both):
            return (
                f"quantization blocks have {_BLOCK} entries, but this rank's shard, with rows of {width} entries, does "
                "not begin and end at block boundaries."
            )
        return None

    def waits(self, part: WeightShard) -> bool:
        """Returns False: a rank always has full blocks."""
        return False

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a shard `[local out, local in]` in 4 bits."""
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(
            local.contiguous(),
            blocksize=_BLOCK,
            # Scales of a shard are compressed in `complete`, over the full weight.
            compress_statistics=self.is_double and part.is_replicated,
            quant_type=self.kind,
            quant_storage=self.storage,
        )
        weight = four_bit_class()(
            codes,
            requires_grad=False,
            quant_state=state,
            blocksize=_BLOCK,
            compress_statistics=state.nested,
            quant_type=self.kind,
            quant_storage=self.storage,
            bnb_quantized=True,
        )
        weight.compute_dtype, weight.entries_in_one = self.compute_dtype, 2 * codes.element_size()
        return weight

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Replaces the scales of a shard by their double-quantized values over the full weight."""
        if self.is_double and not part.is_replicated:
            weight.quant_state.absmax = _twice(weight.quant_state.absmax, part)


def _twice(scales: Tensor, part: WeightShard) -> Tensor:
    """Returns this rank's scales after double quantization of the scales of the full weight."""
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    # Indices of this rank's blocks among the blocks of the full weight, row by row.
    out, width = part.shape
    rows, columns = (torch.cat([torch.arange(*both) for both in ranges]) for ranges in part.ranges)
    here = ((rows[:, None] * width + columns).flatten()[::_BLOCK] // _BLOCK).to(scales.device)
    # [blocks of the full weight]: each rank fills in its own scales.
    unsharded = torch.zeros(-(-out * width // _BLOCK), dtype=scales.dtype, device=scales.device)
    unsharded[here] = scales
    # MAX rather than SUM: with fewer key/value heads than ranks, several ranks have the same blocks.
    dist.all_reduce(unsharded, dist.ReduceOp.MAX, group=part.group)
    mean = unsharded.mean()
    codes, outer = quantize_blockwise(unsharded - mean, blocksize=_OUTER_BLOCK)
    return (dequantize_blockwise(codes, outer) + mean)[here]


@cache
def four_bit_class() -> Any:
    """Returns the class of 4-bit weights, a subclass of bitsandbytes' `Params4bit`."""
    import bitsandbytes
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    class FourBitWeight(QuantizedWeight, Params4bit):
        compute_dtype: torch.dtype | None = None

        def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
            dtype = self.compute_dtype or x.dtype
            bias = None if bias is None else bias.to(dtype)
            return bitsandbytes.matmul_4bit(x.to(dtype), self.codes, self.quant_state, bias=bias).to(x.dtype)

        def dequantized(self) -> Tensor:
            return dequantize_4bit(self.codes, self.quant_state)

        def __deepcopy__(self, memo: dict) -> Any:
            duplicate = super().__deepcopy__(memo)
            duplicate.compute_dtype, duplicate.entries, duplicate.entries_in_one = (
                self.compute_dtype,
                self.entries,
                self.entries_in_one,
            )
            return duplicate

    # PEFT, TRL and transformers look for this class name.
    FourBitWeight.__name__ = "Params4bit"
    return FourBitWeight

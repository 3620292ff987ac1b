"""8-bit weights with one scale per row: bitsandbytes' `load_in_8bit` and torchao's `Int8WeightOnlyConfig`.

The scale of a row comes from its largest entry, which may be on another rank. torchao multiplies by the codes and
scales the result, which may be a partial sum. bitsandbytes also quantizes the inputs, with a scale per input row that
cannot be computed on a rank with only some of the row's entries.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.quantized_weight import QuantizedWeight
from .scheme import WeightShard


@dataclass(frozen=True)
class EightBit:
    """Scheme of `BitsAndBytesConfig(load_in_8bit=True)`."""

    threshold: float

    @property
    def mixes_tokens(self) -> str | None:
        """Reason why a split of a call changes the results; `None` if it does not."""
        if self.threshold == 0:
            return None
        return (
            f"input columns with a value above llm_int8_threshold = {self.threshold} are not quantized for any token "
            "of a call. Set llm_int8_threshold=0.0, or use only data parallelism."
        )

    def misfit(self, part: WeightShard) -> str | None:
        """Returns which columns a rank would lack; `None` if it has all of them."""
        if part.lacks_columns:
            held = sum(stop - start for start, stop in part.ranges[1])
            return (
                f"inputs are quantized with one scale per token, and a rank has {held} of its {part.shape[1]} entries; "
                "load_in_4bit and torchao's Int8WeightOnlyConfig do not quantize inputs."
            )
        return None

    def waits(self, part: WeightShard) -> bool:
        """Returns False: a rank always has full rows."""
        return False

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a shard `[local out, in]` in 8 bits."""
        from bitsandbytes.functional import int8_vectorwise_quant

        codes, scales, _ = int8_vectorwise_quant(local.contiguous().to(torch.float16))
        weight = eight_bit_class()(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        weight.threshold = self.threshold
        return weight

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Does nothing: the scales are final."""


@cache
def eight_bit_class() -> Any:
    """Returns the class of 8-bit weights, a subclass of bitsandbytes' `Int8Params`."""
    import bitsandbytes
    from bitsandbytes.nn import Int8Params

    class EightBitWeight(QuantizedWeight, Int8Params):
        threshold: float = 0.0

        def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
            state = bitsandbytes.MatmulLtState()
            state.has_fp16_weights, state.threshold = False, self.threshold
            # On a CPU, bitsandbytes multiplies in full precision in training and in 8 bits in evaluation.
            state.is_training = torch.is_grad_enabled()
            state.CB, state.SCB = self.codes, self.SCB
            bias = None if bias is None else bias.to(x.dtype)
            return bitsandbytes.matmul(x, self.codes, bias=bias, state=state)

        def dequantized(self) -> Tensor:
            return bitsandbytes.functional.int8_vectorwise_dequant(self.codes, self.SCB)

        def __deepcopy__(self, memo: dict) -> Any:
            duplicate = super().__deepcopy__(memo)
            duplicate.CB, duplicate.threshold, duplicate.entries = duplicate.codes, self.threshold, self.entries
            return duplicate

    EightBitWeight.__name__ = "Int8Params"
    return EightBitWeight


@dataclass(frozen=True)
class Int8Rows:
    """Scheme of `TorchAoConfig(Int8WeightOnlyConfig())`."""

    config: Any
    mixes_tokens = None

    def misfit(self, part: WeightShard) -> str | None:
        """Returns `None`: any shard fits."""
        return None

    def waits(self, part: WeightShard) -> bool:
        """Returns whether other ranks have entries of this rank's rows."""
        return part.lacks_columns

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a shard `[local out, local in]` in 8 bits."""
        from torchao.quantization import quantize_

        holder = nn.Linear(1, 1, bias=False, device="meta")
        width = local.shape[1]
        if self.waits(part):
            # [local out]: an extra column with the full rows' largest entries yields their scales on every rank.
            largest = local.abs().amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
            local = torch.cat([local, largest[:, None]], 1)
        holder.weight = nn.Parameter(local.contiguous(), requires_grad=False)
        quantize_(holder, self.config)
        quantized: Any = holder.weight
        # Drop the extra column again: [local out, local in].
        weight = RowsWeight(quantized.qdata[:, :width].contiguous(), requires_grad=False)
        weight.factors = quantized.scale.flatten()
        return weight

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Does nothing: the scales are final."""


class RowsWeight(QuantizedWeight):
    """Codes `[local out, local in]` and one scale per row."""

    factors: Tensor

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies `[..., local in]` by the codes, then by the scales: `[..., local out]`."""
        y = _MultiplyCodes.apply(x, self.codes) * self.factors.to(x.dtype)
        return y if bias is None else y + bias

    def dequantized(self) -> Tensor:
        """Returns the dequantized weight `[local out, local in]`."""
        return self.codes * self.factors[:, None]

    def __deepcopy__(self, memo: dict) -> "RowsWeight":
        duplicate = RowsWeight(self.codes.clone(), requires_grad=False)
        duplicate.factors, duplicate.entries = self.factors.clone(), self.entries
        return duplicate


class _MultiplyCodes(torch.autograd.Function):
    """Matmul that saves the codes for backward, not their copy in the dtype of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        return nn.functional.linear(x, codes.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [codes] = ctx.saved_tensors
        return gradient @ codes.to(gradient.dtype), None

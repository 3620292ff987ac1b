"""Eight bits with a scale for each row: bitsandbytes' `load_in_8bit` and torchao's `Int8WeightOnlyConfig`.

A row's scale comes of its largest entry, which another rank may have. torchao multiplies codes and scales the result,
which may be a sum over ranks. bitsandbytes quantises inputs too, with a scale for each row of them, which no rank has.
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
    """What a `BitsAndBytesConfig(load_in_8bit=True)` asks for."""

    threshold: float

    @property
    def mixes_tokens(self) -> str | None:
        """Says why parts of a call are not computed as the whole is."""
        if self.threshold == 0:
            return None
        return (
            f"columns of inputs that exceed llm_int8_threshold = {self.threshold} anywhere in a call are computed in "
            "full for all of its rows. Set llm_int8_threshold=0.0, or train on dp alone."
        )

    def misfit(self, part: WeightShard) -> str | None:
        """Says which columns a rank would lack."""
        if part.lacks_columns:
            held = sum(stop - start for start, stop in part.ranges[1])
            return (
                f"inputs are quantised row by row, and a rank has {held} of their {part.shape[1]} entries; four bits "
                "(load_in_4bit) and torchao's Int8WeightOnlyConfig leave inputs alone."
            )
        return None

    def waits(self, part: WeightShard) -> bool:
        """Waits for nobody: rows are whole."""
        return False

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a part `[local out, in]` in eight bits."""
        from bitsandbytes.functional import int8_vectorwise_quant

        codes, scales, _ = int8_vectorwise_quant(local.contiguous().to(torch.float16))
        weight = eight_bit_class()(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
        weight.threshold = self.threshold
        return weight

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Lacks nothing."""


@cache
def eight_bit_class() -> Any:
    """Returns the class of weights in eight bits, one of bitsandbytes'."""
    import bitsandbytes
    from bitsandbytes.nn import Int8Params

    class EightBitWeight(QuantizedWeight, Int8Params):
        threshold: float = 0.0

        def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
            state = bitsandbytes.MatmulLtState()
            state.has_fp16_weights, state.threshold = False, self.threshold
            # On a CPU what is trained is multiplied in full, what is evaluated in eight bits.
            state.is_training = torch.is_grad_enabled()
            state.CB, state.SCB = self.codes, self.SCB
            bias = None if bias is None else bias.to(x.dtype)
            return bitsandbytes.matmul(x, self.codes, bias=bias, state=state)

        def dequantized(self) -> Tensor:
            return bitsandbytes.functional.int8_vectorwise_dequant(self.codes, self.SCB)

        def __deepcopy__(self, memo: dict) -> Any:
            tiny_model = super().__deepcopy__(memo)
            tiny_model.CB, tiny_model.threshold, tiny_model.entries = tiny_model.codes, self.threshold, self.entries
            return tiny_model

    EightBitWeight.__name__ = "Int8Params"
    return EightBitWeight


@dataclass(frozen=True)
class Int8Rows:
    """What a `TorchAoConfig(Int8WeightOnlyConfig())` asks for."""

    config: Any
    mixes_tokens = None

    def misfit(self, part: WeightShard) -> str | None:
        """Fits any part."""
        return None

    def waits(self, part: WeightShard) -> bool:
        """Tells whether other ranks have entries of this rank's rows."""
        return part.lacks_columns

    def quantize(self, local: Tensor, part: WeightShard) -> QuantizedWeight:
        """Returns a part `[local out, local in]` in eight bits."""
        from torchao.quantization import quantize_

        holder = nn.Linear(1, 1, bias=False, device="meta")
        width = local.shape[1]
        if self.waits(part):
            # One more column with the rows' largest entries gives every rank the scales of the whole.
            largest = local.abs().amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
            local = torch.cat([local, largest[:, None]], 1)
        holder.weight = nn.Parameter(local.contiguous(), requires_grad=False)
        quantize_(holder, self.config)
        made: Any = holder.weight
        weight = RowsWeight(made.qdata[:, :width].contiguous(), requires_grad=False)
        weight.factors = made.scale.flatten()
        return weight

    def complete(self, weight: Any, part: WeightShard) -> None:
        """Lacks nothing."""


class RowsWeight(QuantizedWeight):
    """Codes `[local out, local in]` and a factor for each row."""

    factors: Tensor

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies `[..., local in]` by the codes, then by the factors: `[..., local out]`."""
        y = _MultiplyCodes.apply(x, self.codes) * self.factors.to(x.dtype)
        return y if bias is None else y + bias

    def dequantized(self) -> Tensor:
        """Returns the weight `[local out, local in]`."""
        return self.codes * self.factors[:, None]

    def __deepcopy__(self, memo: dict) -> "RowsWeight":
        tiny_model = RowsWeight(self.codes.clone(), requires_grad=False)
        tiny_model.factors, tiny_model.entries = self.factors.clone(), self.entries
        return tiny_model


class _MultiplyCodes(torch.autograd.Function):
    """Keeps codes for backward, not what they are in the dtype of the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(codes)
        return nn.functional.linear(x, codes.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [codes] = ctx.saved_tensors
        return gradient @ codes.to(gradient.dtype), None

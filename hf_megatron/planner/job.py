"""What is to be trained, on what, and in what steps."""

from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .devices import Device
from .time_model import STOCK, Efficiency
from .training import WHOLE, Training

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Job:
    """A training job.

    Args:
        devices (`int`): how many there are.
        device (`Device`): what each is.
        sequence_length (`int`): tokens of a row.
        global_batch (`int`): rows of an optimizer step.
        precision (`str`, defaults to bf16): of products: bf16, fp16, fp32, or fp8 with weights in bf16.
        efficiency (`Efficiency`): of the stack; by default that of stock modules.
        training (`Training`, *optional*): what of the model is trained; all of it by default.
        document_length (`float`, *optional*): tokens of a document on average, where rows are packed and documents do
            not attend to each other; by default a row is one.
        target_length (`int`, *optional*): tokens of a row of labels, which an encoder-decoder's decoder reads; by
            default as many as its encoder reads, of `sequence_length`.
        memory_share (`float`, defaults to 0.9): of a device's memory that may be planned for; the rest is what NCCL,
            cuBLAS and the allocator take.

    Raises:
        ConfigError: a value out of its range.
    """

    devices: int
    device: Device
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    efficiency: Efficiency = STOCK
    training: Training = WHOLE
    document_length: float | None = None
    target_length: int | None = None
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        for name in ("devices", "sequence_length", "global_batch"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"Job.{name} = {value}: expected 1 or more.")
        if self.precision not in _DTYPES:
            raise ConfigError(f"Job.precision = {self.precision!r}: expected one of {', '.join(_DTYPES)}.")
        if self.document_length is not None and not 1 <= self.document_length <= self.sequence_length:
            raise ConfigError(
                f"Job.document_length = {self.document_length}: expected 1 to {self.sequence_length}, a row's tokens."
            )
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"Job.memory_share = {self.memory_share}: expected a share above 0, at most 1.")
        self.device.peak(self.precision)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return _DTYPES[self.precision]

    @property
    def itemsize(self) -> int:
        """Bytes of a weight's entry."""
        return self.dtype.itemsize

    @property
    def memory(self) -> float:
        """Bytes of a device that may be planned for."""
        return self.device.memory_gib * 2**30 * self.memory_share

    @property
    def attended(self) -> float:
        """Share of a row's pairs of tokens that attend to each other, of those in a row that is one document."""
        return 1.0 if self.document_length is None else self.document_length / self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step; those that an encoder reads, where there is one."""
        return self.sequence_length * self.global_batch

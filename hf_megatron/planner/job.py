"""Training job: model training settings, devices, and batch shape."""

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
        devices (`int`): number of devices.
        device (`Device`): type of the devices.
        sequence_length (`int`): tokens of a sequence.
        global_batch (`int`): sequences of an optimizer step.
        precision (`str`, defaults to bf16): of products: bf16, fp16, fp32, or fp8 with weights in bf16.
        efficiency (`Efficiency`): of the software stack; stock modules by default.
        training (`Training`, *optional*): trained parts of the model; all by default.
        document_length (`float`, *optional*): average tokens of a document, if sequences are packed and documents do
            not attend to each other; by default a sequence is one document.
        target_length (`int`, *optional*): tokens of a label sequence, which the decoder of an encoder-decoder reads; by
            default `sequence_length`, as for its encoder.
        memory_share (`float`, defaults to 0.9): share of a device's memory to plan for; NCCL, cuBLAS and the allocator
            take the rest.

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
                raise ConfigError(f"{name} = {value}: expected 1 or more.")
        if self.precision not in _DTYPES:
            raise ConfigError(f"precision = {self.precision!r}: expected one of {', '.join(_DTYPES)}.")
        if self.document_length is not None and not 1 <= self.document_length <= self.sequence_length:
            raise ConfigError(
                f"document_length = {self.document_length}: expected 1 to {self.sequence_length}, the sequence length."
            )
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share = {self.memory_share}: expected a value above 0 and at most 1.")
        self.device.peak(self.precision)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return _DTYPES[self.precision]

    @property
    def itemsize(self) -> int:
        """Bytes of a weight's entry."""
        return self.dtype.itemsize

    @property
    def memory(self) -> float:
        """Bytes of a device's memory to plan for."""
        return self.device.memory_gib * 2**30 * self.memory_share

    @property
    def attended(self) -> float:
        """Number of token pairs that attend to each other, relative to sequences with a single document."""
        return 1.0 if self.document_length is None else self.document_length / self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step; with an encoder-decoder, tokens of the encoder."""
        return self.sequence_length * self.global_batch

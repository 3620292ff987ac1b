"""Statistics of one training step on one rank: bytes, collectives, and host reads."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HostRead:
    """A point where the host waits for a device.

    Attributes:
        operation: name of the torch operation.
        moment: `"forward"`, `"backward"` or `"optimizer step"`.
        where: functions on the stack, innermost first, with line numbers.
    """

    operation: str
    moment: str
    where: tuple[str, ...]


@dataclass
class StepFigures:
    """Statistics of one step on one rank, in bytes.

    Attributes:
        parameters: number of local parameter entries after tensor and pipeline parallelism, if known. Data-parallel
            ranks shard the state kept for them: the optimizer states, with ZeRO-3 the weights as well.
        kept: category -> bytes when the step began.
        peak: peak memory, `kept` included.
        at_peak: category -> bytes at the peak.
        collectives: (group, operation) -> number of calls, and total bytes of the largest tensor argument of each.
        reads: points where the host waited for the device.
        layers: (layer, its call in the step) -> cause -> bytes retained when the call returned.
    """

    parameters: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    collectives: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    reads: list[HostRead] = field(default_factory=list)
    layers: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict)

    @property
    def dynamic_peak(self) -> int:
        """Peak memory in excess of the memory in use when the step began, in bytes."""
        return self.peak - sum(self.kept.values())

    @property
    def per_parameter(self) -> dict[str, float]:
        """Category -> bytes kept between steps, divided by `parameters`."""
        return {category: size / self.parameters for category, size in self.kept.items()}

    def get_package_reads(self, package: str) -> list[HostRead]:
        """Returns the reads requested by functions of a package, such as `"hf_megatron"`."""
        return [read for read in self.reads if read.where and read.where[0].startswith(f"{package}.")]

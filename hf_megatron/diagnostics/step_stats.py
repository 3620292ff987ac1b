"""What one training step does on one rank, in bytes, calls and waits."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HostRead:
    """A place where the host waits for a device.

    Attributes:
        operation: of torch.
        moment: `"forward"`, `"backward"` or `"optimizer step"`.
        where: functions on the stack, innermost first, with their lines.
    """

    operation: str
    moment: str
    where: tuple[str, ...]


@dataclass
class StepFigures:
    """What one step did on one rank, in bytes.

    Attributes:
        parameters: entries of the model that are this rank's by tensor and pipeline parallelism, where known. Data
            parallel ranks split what is kept of them: the optimizer's state, with stage 3 the weights as well.
        kept: category -> bytes when the step began.
        peak: the most that was there at a time, `kept` included.
        at_peak: category -> bytes at that time.
        collectives: (group, operation) -> number of calls and bytes of their largest tensors.
        reads: places where the host waited for the device.
        layers: (layer, its call in the step) -> cause -> bytes that it had left when it returned.
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
        """The most bytes at a time beside what was there when the step began."""
        return self.peak - sum(self.kept.values())

    @property
    def per_parameter(self) -> dict[str, float]:
        """Category -> bytes that are kept from step to step, per one of `parameters`."""
        return {category: size / self.parameters for category, size in self.kept.items()}

    def reads_of(self, package: str) -> list[HostRead]:
        """Lists where functions of a package asked for a value, such as `"hf_megatron"`."""
        return [read for read in self.reads if read.where and read.where[0].startswith(f"{package}.")]

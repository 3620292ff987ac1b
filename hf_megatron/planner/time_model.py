"""Time model of a unit's work on a device, with constants fitted to published runs.

`docs/planner.md` has the runs, the residuals, and the limits of the model; `benchmarks/calibrate_planner.py` fits the
constants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import ConfigError
from .devices import Device
from .unit_work import Work

AXES = ("tp", "cp", "ep", "pp", "dp")
LINKS = ("link", "network")


@dataclass(frozen=True)
class Efficiency:
    """Efficiency of a training stack: shares of what the device can do at best.

    Args:
        half_width: precision -> smallest dim of a product at which it reaches half the rate of a large one; bf16's
            value for precisions not listed.
        attention (`float`): share of the bf16 peak that attention cores reach (of the fp32 peak in fp32).
        moved_share (`float`): bytes moved by the stack's fused kernels, relative to separate kernels.
        kernel_share (`float`): kernels launched by the stack, relative to stock modules.
        link_share, network_share (`float`): share of the link and network bandwidth.
        exposed: axis -> share of the communication that is not overlapped with computation.
        hidden_after (`float`): share of a step that can overlap with data-parallel communication.
        call_us (`float`): microseconds per collective in addition to its transfer time.
    """

    half_width: Mapping[str, float]
    attention: float
    moved_share: float
    kernel_share: float
    link_share: float
    network_share: float
    exposed: Mapping[str, float]
    hidden_after: float = 0.9
    call_us: float = 0.0


# Fitted to published runs of tuned stacks with fused kernels and overlapped communication.
PUBLISHED = Efficiency(
    half_width={"bf16": 264.0, "fp8": 528.0},
    attention=0.489,
    moved_share=0.69,
    kernel_share=0.55,
    link_share=0.88,
    network_share=0.86,
    exposed={"tp": 0.634, "cp": 0.3, "ep": 0.612, "pp": 0.3, "dp": 0.118},
)
# Stock modules as this library runs them: no fused kernels, layers wait for their collectives, and only data-parallel
# gradients and weights overlap with computation. Not fitted yet, for lack of measured runs.
STOCK = replace(
    PUBLISHED,
    moved_share=1.0,
    kernel_share=1.0,
    exposed={"tp": 1.0, "cp": 1.0, "ep": 1.0, "pp": 1.0, "dp": PUBLISHED.exposed["dp"]},
    call_us=10.0,
)


@dataclass(frozen=True)
class Times:
    """Seconds of some work.

    Attributes:
        compute: products, attention and other kernels.
        exposed: axis -> communication that is not overlapped.
        by_floor: share of `compute` that launching takes beyond the kernels, in seconds; above 0 if the work is too
            small for the device, in which case the estimate is too low rather than too high.
    """

    compute: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    by_floor: float = 0.0

    @property
    def total(self) -> float:
        """Sum of computation and exposed communication."""
        return self.compute + sum(self.exposed.values())

    def __add__(self, other: "Times") -> "Times":
        axes = dict.fromkeys([*self.exposed, *other.exposed])
        exposed = {axis: self.exposed.get(axis, 0.0) + other.exposed.get(axis, 0.0) for axis in axes}
        return Times(self.compute + other.compute, exposed, self.by_floor + other.by_floor)

    def repeated(self, times: float) -> "Times":
        """Returns the seconds of `times` repetitions of this work."""
        exposed = {axis: value * times for axis, value in self.exposed.items()}
        return Times(self.compute * times, exposed, self.by_floor * times)


def seconds(work: Work, device: Device, efficiency: Efficiency, precision: str, links: Mapping[str, str]) -> Times:
    """Returns the time that a rank takes for some work.

    Computation is the sum of products, attention and moved bytes, or the time of the launches if that is longer.
    Exposed communication is added.

    Args:
        work: of one unit, as large as what is launched together: a layer rather than a model.
        precision (`str`): of products, as in `Device.peak_tflops`; with fp8, attention stays in bf16.
        links: axis -> `"link"` or `"network"`, for each axis with traffic.

    Raises:
        ConfigError: the device lacks the precision; an axis with traffic has no such link.
    """
    peak = device.reached(precision)
    half = efficiency.half_width.get(precision, efficiency.half_width["bf16"])
    products = sum(flops * (width + half) / width for width, flops in work.matmuls.items()) / peak
    attention = work.attention / (device.peak("bf16" if precision == "fp8" else precision) * efficiency.attention)
    moved = work.moved * efficiency.moved_share / (device.memory_tb_s * 1e12 * device.memory_share)
    kernels = products + attention + moved
    launches = work.kernels * efficiency.kernel_share * device.launch_us * 1e-6
    exposed = {
        axis: communication_seconds(axis, calls, size, device, efficiency, links) * efficiency.exposed[axis]
        for axis, (calls, size) in work.traffic.items()
    }
    return Times(max(kernels, launches), exposed, max(0.0, launches - kernels))


def communication_seconds(
    axis: str, calls: float, size: float, device: Device, efficiency: Efficiency, links: Mapping[str, str]
) -> float:
    """Returns the time of an axis's collectives, overlapped or not.

    Args:
        calls, size: number of collectives, and bytes that one rank sends in all of them.
        links: as in `seconds`.

    Raises:
        ConfigError: the axis has no such link.
    """
    link = links.get(axis)
    if axis not in AXES or link not in LINKS:
        valid = f"one of {', '.join(LINKS)} for each of {', '.join(AXES)}"
        raise ConfigError(f"links[{axis!r}] = {link!r}: expected {valid}.")
    rate = {
        "link": device.link_gb_s * efficiency.link_share,
        "network": device.network_gb_s * efficiency.network_share,
    }[link]
    return size / (rate * 1e9) + calls * efficiency.call_us * 1e-6


def exposed_reduction(reduction: float, step: float, efficiency: Efficiency) -> float:
    """Returns the seconds that a step waits for data-parallel gradients and weights.

    Args:
        reduction (`float`): seconds of the communication.
        step (`float`): seconds of the computation that overlaps with it.
    """
    return reduction * efficiency.exposed["dp"] + max(0.0, reduction - efficiency.hidden_after * step)

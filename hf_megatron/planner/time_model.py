"""Seconds that the work of a unit takes on a device, by constants that published runs were fitted with.

`docs/planner.md` has the rows, what the constants leave of each, and where they fail; `benchmarks/calibrate_planner.py`
fits them.
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
    """How a training stack uses a device: shares are of what the device could do at best.

    Args:
        half_width: precision -> the smallest dim of a product at which it is half as fast as a large one; bf16's where
            a precision is not there.
        attention (`float`): share of the bf16 peak that attention cores reach (of fp32's in fp32).
        moved_share (`float`): of the bytes that separate kernels move, what the stack's fused ones do.
        kernel_share (`float`): of the kernels that stock modules launch, how many the stack does.
        link_share, network_share (`float`): of the rates of links and network.
        exposed: axis -> share of the communication that no computation hides.
        hidden_after (`float`): share of a step that can hide communication of data parallel ranks.
        call_us (`float`): microseconds that each collective takes beside its bytes.
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


# Of tuned stacks with fused kernels and overlapped communication.
PUBLISHED = Efficiency(
    half_width={"bf16": 264.0, "fp8": 528.0},
    attention=0.489,
    moved_share=0.69,
    kernel_share=0.55,
    link_share=0.88,
    network_share=0.86,
    exposed={"tp": 0.634, "cp": 0.3, "ep": 0.612, "pp": 0.3, "dp": 0.118},
)
# Of stock modules as this library runs them: nothing is fused, a layer waits for its collectives, and only gradients
# and weights of data parallel ranks travel beside computing. Not fitted: a start until there are rows of its own.
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
        compute: of products, attention and other kernels.
        exposed: axis -> of communication that nothing hides.
        by_floor: of `compute`, what launching kernels takes beyond the kernels; above 0 where work is too small for
            the device, and where the estimate is too low rather than too high.
    """

    compute: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    by_floor: float = 0.0

    @property
    def total(self) -> float:
        """All of it, one after the other."""
        return self.compute + sum(self.exposed.values())

    def __add__(self, other: "Times") -> "Times":
        axes = dict.fromkeys([*self.exposed, *other.exposed])
        exposed = {axis: self.exposed.get(axis, 0.0) + other.exposed.get(axis, 0.0) for axis in axes}
        return Times(self.compute + other.compute, exposed, self.by_floor + other.by_floor)

    def repeated(self, times: float) -> "Times":
        """Returns the seconds of so many such pieces of work."""
        exposed = {axis: value * times for axis, value in self.exposed.items()}
        return Times(self.compute * times, exposed, self.by_floor * times)


def seconds(work: Work, device: Device, efficiency: Efficiency, precision: str, links: Mapping[str, str]) -> Times:
    """Returns how long a rank takes for some work.

    Computing is products, attention and moved bytes one after the other, or launching, whichever takes longer;
    communication that is exposed comes after it.

    Args:
        work: of one unit, as large as what is launched together: a layer rather than a model.
        precision (`str`): of products, as of `Device.peak_tflops`; with fp8 attention stays in bf16.
        links: axis -> `"link"` or `"network"`, of each axis with traffic.

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
    """Returns how long collectives of an axis take, hidden or not.

    Args:
        calls, size: how many, and bytes that one rank sends in all of them.
        links: as of `seconds`.

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
    """Returns what a step waits for gradients and weights of data parallel ranks, in seconds.

    Args:
        reduction (`float`): seconds that they travel.
        step (`float`): seconds of the computing that they travel beside.
    """
    return reduction * efficiency.exposed["dp"] + max(0.0, reduction - efficiency.hidden_after * step)

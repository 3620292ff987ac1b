"""Device-independent work of a unit: computation, memory traffic, and communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """Work of one unit (a layer, or the part before or after the layers) for a microbatch on a rank, in one direction.

    Attributes:
        matmuls: smallest dim of the product -> floating point operations (`2 m k n`).
        attention: floating point operations of attention cores.
        moved: bytes that other kernels read and write.
        kernels: number of kernel launches.
        traffic: axis (`"tp"`, `"cp"`, `"ep"`, `"pp"`, `"dp"`) -> calls, and bytes that one rank sends.
    """

    matmuls: Mapping[int, float] = field(default_factory=dict)
    attention: float = 0.0
    moved: float = 0
    kernels: float = 0
    traffic: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Floating point operations of matrix products and attention."""
        return sum(self.matmuls.values()) + self.attention

    def __add__(self, other: "Work") -> "Work":
        matmuls = dict(self.matmuls)
        for width, flops in other.matmuls.items():
            matmuls[width] = matmuls.get(width, 0.0) + flops
        traffic = dict(self.traffic)
        for axis, (calls, size) in other.traffic.items():
            before = traffic.get(axis, (0, 0))
            traffic[axis] = before[0] + calls, before[1] + size
        return Work(
            matmuls,
            self.attention + other.attention,
            self.moved + other.moved,
            self.kernels + other.kernels,
            traffic,
        )

    def scaled(self, factor: float) -> "Work":
        """Returns the work for a fraction of the tokens: as many kernels, each with fewer entries."""
        return Work(
            {width: flops * factor for width, flops in self.matmuls.items()},
            self.attention * factor,
            self.moved * factor,
            self.kernels,
            {axis: (calls, size * factor) for axis, (calls, size) in self.traffic.items()},
        )

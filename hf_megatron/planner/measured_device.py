"""Benchmark of the current machine as a planner device: matrix products, copies, and kernel launches."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..errors import ConfigError
from .devices import Device
from .time_model import PUBLISHED

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Sides of the product, and bytes of the copy: large enough to hide launch costs.
_SIDES = {"cuda": 8192, "cpu": 1024}
_COPIES = {"cuda": 2**30, "cpu": 2**27}
_LAUNCHES = 500
_TINY = 256


def measure_device(
    device_type: str | None = None, *, like: Device | None = None, seconds: float = 0.5, is_tiny: bool = False
) -> Device:
    """Measures matrix products, copies and kernel launches on the current machine.

    Links and networks take several machines to measure: they are taken from `like`, or else set to the speed of
    copies to and from the host, which the device's note states.

    Args:
        device_type (`str`, *optional*): `"cuda"` or `"cpu"`; by default cuda if available.
        like (`Device`, *optional*): source of memory, peaks, links and network. Without it peaks are the measured
            rates of large products, and memory is the machine's.
        seconds (`float`, defaults to 0.5): duration of each measurement.
        is_tiny (`bool`, defaults to `False`): small products and copies, for tests; the values are meaningless.

    Raises:
        ConfigError: no such device.
    """
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in _SIDES or (kind == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device_type = {kind!r}: expected cuda (if torch finds a GPU) or cpu.")
    wait: Callable[[], Any] = torch.cuda.synchronize if kind == "cuda" else lambda: None
    side = _TINY if is_tiny else _SIDES[kind]
    rates = {
        name: 2.0 * side**3 / _product_seconds(side, dtype, kind, wait, seconds) for name, dtype in _DTYPES.items()
    }
    size = 2**20 if is_tiny else _COPIES[kind]
    # A copy reads and writes each byte.
    memory = 2.0 * size / _copy_seconds(size, kind, kind, wait, seconds)
    host = size / _copy_seconds(size, "cpu", kind, wait, seconds) if kind == "cuda" else memory / 2
    launch_us = _launch_seconds(kind, wait, seconds) * 1e6
    # Extrapolated rate of an infinitely large product.
    full = {name: rate * (1 + PUBLISHED.half_width["bf16"] / side) for name, rate in rates.items()}
    if like is not None:
        fractions = {
            name: _digits(min(1.0, rate / like.peak(name))) for name, rate in full.items() if name in like.peak_tflops
        }
        return replace(
            like,
            name=f"{_name(kind)} (measured)",
            matmul_share={**like.matmul_share, **fractions},
            memory_share=_digits(min(1.0, memory / (like.memory_tb_s * 1e12))),
            host_gb_s=_digits(host / 1e9),
            launch_us=_digits(launch_us),
            note=f"measured with torch {torch.__version__}; peaks, memory, links and network copied from {like.name}",
        )
    return Device(
        name=f"{_name(kind)} (measured)",
        memory_gib=_digits(_memory(kind) / 2**30),
        peak_tflops={name: _digits(rate / 1e12) for name, rate in full.items()},
        memory_tb_s=_digits(memory / 1e12),
        link_gb_s=_digits(host / 1e9),
        devices_per_link=torch.cuda.device_count() if kind == "cuda" else 1,
        network_gb_s=_digits(host / 1e9),
        host_gb_s=_digits(host / 1e9),
        memory_share=1.0,
        launch_us=_digits(launch_us),
        note=f"measured with torch {torch.__version__}; link_gb_s and network_gb_s are host copy rates: replace them",
    )


def _product_seconds(side: int, dtype: torch.dtype, kind: str, wait: Callable[[], Any], seconds: float) -> float:
    one, other = (torch.randn(side, side, device=kind).to(dtype) for _ in range(2))
    result = torch.empty_like(one)
    return _repeated(lambda: torch.mm(one, other, out=result), wait, seconds)


def _copy_seconds(size: int, source: str, target: str, wait: Callable[[], Any], seconds: float) -> float:
    pinned = source == "cpu" and target == "cuda"
    tensor = torch.ones(size, dtype=torch.uint8, device=source, pin_memory=pinned)
    copy = torch.empty(size, dtype=torch.uint8, device=target)
    return _repeated(lambda: copy.copy_(tensor, non_blocking=True), wait, seconds)


def _launch_seconds(kind: str, wait: Callable[[], Any], seconds: float) -> float:
    small = torch.zeros(1, device=kind)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1.0)

    return _repeated(launches, wait, seconds) / _LAUNCHES


def _repeated(run: Callable[[], Any], wait: Callable[[], Any], seconds: float) -> float:
    """Returns the median seconds of a call, after two warm-up calls."""
    for _ in range(2):
        run()
    wait()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _name(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine()


def _memory(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _digits(value: float) -> float:
    """Rounds to three significant digits; further digits would not be reproducible."""
    return round(value, 2 - math.floor(math.log10(value)))

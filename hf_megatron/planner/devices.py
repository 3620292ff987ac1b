"""Device properties: built-in devices from data sheets, and a user's YAML files."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.io.safe_paths import replace_file
from ..errors import ConfigError

PRECISIONS = ("bf16", "fp8", "fp16", "fp32")
_FILE = "devices.json"
# Precision -> one with the same peak on all of these devices.
_ALIKE = {"fp16": "bf16"}


@dataclass(frozen=True)
class Device:
    """One accelerator of a cluster of identical devices.

    Args:
        name (`str`): shown in reports.
        memory_gib (`float`): memory in GiB.
        peak_tflops: precision (of `PRECISIONS`) -> dense peak of matrix products, TFLOP/s.
        memory_tb_s (`float`): peak memory bandwidth, TB/s, reads and writes together.
        link_gb_s (`float`): bandwidth to devices of its node or rack (NVLink) in each direction, GB/s.
        devices_per_link (`int`): number of devices that such links connect.
        network_gb_s (`float`): bandwidth to all other devices in each direction, GB/s.
        host_gb_s (`float`): bandwidth to or from host memory, GB/s.
        matmul_share: precision -> share of the peak that large products reach; 1 for precisions not listed.
        memory_share (`float`, defaults to 0.8): share of the peak memory bandwidth that large copies reach.
        launch_us (`float`, defaults to 5): microseconds between the launches of two small kernels.
        note (`str`, *optional*): source of the values.

    Raises:
        ConfigError: a value out of range.
    """

    name: str
    memory_gib: float
    peak_tflops: Mapping[str, float]
    memory_tb_s: float
    link_gb_s: float
    devices_per_link: int
    network_gb_s: float
    host_gb_s: float
    matmul_share: Mapping[str, float] = field(default_factory=dict)
    memory_share: float = 0.8
    launch_us: float = 5.0
    note: str = ""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.type is str:
                if not isinstance(value, str) or (one.name == "name" and not value):
                    raise self._wrong(one.name, value, "a string")
            elif one.type in (float, int):
                if not _is_positive(value) or (one.type is int and value != int(value)):
                    kind = "an integer of 1 or more" if one.type is int else "a number above 0"
                    raise self._wrong(one.name, value, kind)
            elif not _is_by_precision(value) or (one.name == "peak_tflops" and not value):
                raise self._wrong(one.name, value, f"a number above 0 for some of {', '.join(PRECISIONS)}")
        for name in ("matmul_share", "memory_share"):
            value = getattr(self, name)
            if max(value.values(), default=1) > 1 if isinstance(value, Mapping) else value > 1:
                raise self._wrong(name, value, "a share of the peak, 1 or less")

    def _wrong(self, name: str, value: object, valid: str) -> ConfigError:
        return ConfigError(f"Device.{name} = {value!r}: expected {valid}.")

    def peak(self, precision: str) -> float:
        """Returns the dense peak in operations per second; fp16 defaults to the peak of bf16.

        Raises:
            ConfigError: the device lacks the precision.
        """
        precision = self._own(precision)
        if precision not in self.peak_tflops:
            known = ", ".join(self.peak_tflops)
            raise ConfigError(
                f"precision = {precision!r} is not supported: Device {self.name!r} has peak_tflops for {known} only."
            )
        return self.peak_tflops[precision] * 1e12

    def reached(self, precision: str) -> float:
        """Returns operations per second that large products reach; raises `ConfigError` as `peak` does."""
        return self.peak(precision) * self.matmul_share.get(self._own(precision), 1.0)

    def _own(self, precision: str) -> str:
        return precision if precision in self.peak_tflops else _ALIKE.get(precision, precision)

    def connection(self, devices: int) -> str:
        """Returns how `devices` neighboring devices are connected: `"link"`, or `"network"` beyond the link domain."""
        return "link" if devices <= self.devices_per_link else "network"


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_by_precision(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        name in PRECISIONS and _is_positive(number) for name, number in value.items()
    )


def device_names() -> tuple[str, ...]:
    """Returns the names of the built-in devices."""
    return tuple(_built_in())


def device(name_or_path: str | os.PathLike[str]) -> Device:
    """Returns a built-in device by its case-insensitive name, or the device of a YAML file.

    Args:
        name_or_path: a file if it ends in `.yaml` or `.yml` or has a folder; it has the fields of `Device`.

    Raises:
        ConfigError: no such device or file; a field that is missing, unknown or wrong.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return read_device(path)
    rows = _built_in()
    name = str(name_or_path).lower()
    if name not in rows:
        raise ConfigError(f"device {name!r}: expected one of {', '.join(rows)}, or the path of a YAML file.")
    return _device(rows[name], _FILE)


def read_device(path: str | os.PathLike[str]) -> Device:
    """Reads a YAML file with the fields of one `Device`; raises `ConfigError` as `device` does."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"device file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"device file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    return _device(values, path)


def write_device(written: Device, path: str | os.PathLike[str]) -> None:
    """Writes a device as a YAML file that `device` reads."""
    import yaml

    values = {name: dict(v) if isinstance(v, Mapping) else v for name, v in vars(written).items()}
    text = yaml.safe_dump(values, sort_keys=False)
    replace_file(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))


def _built_in() -> dict[str, Any]:
    return json.loads(resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8"))


def _device(values: object, path: object) -> Device:
    known = {one.name: one for one in dataclasses.fields(Device)}
    if not isinstance(values, dict):
        raise ConfigError(f"device file {path}: expected the fields {', '.join(known)}.")
    if unknown := [str(name) for name in values if name not in known]:
        raise ConfigError(f"device file {path}: unknown {', '.join(unknown)}; fields are {', '.join(known)}.")
    needed = [name for name, one in known.items() if one.default is one.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(f"device file {path}: missing {', '.join(missing)}.")
    try:
        return Device(**values)
    except ConfigError as error:
        raise ConfigError(f"device file {path}: {error}") from error

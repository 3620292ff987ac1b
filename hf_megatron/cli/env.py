"""`hf-megatron env`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing


def env() -> None:
    """Print the library versions to include in a bug report."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for name in ("hf_megatron", "torch", "transformers", "accelerate", "safetensors", "peft", "trl", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    typer.echo(json.dumps(versions, indent=2))


def measure_this_machine(
    output: Annotated[Path, typer.Argument(help="The YAML file that is written.")],
    like: Annotated[
        str, typer.Option(help="A built-in device or a YAML file with the memory, peaks and links of this machine.")
    ] = "",
    device_type: Annotated[str, typer.Option(help="cuda or cpu; by default the first that is there.")] = "",
    seconds: Annotated[float, typer.Option(help="Of repeating, for each measurement.", min=0)] = 0.5,
) -> None:
    """Measure matrix products, copies and launches on this machine, as a device for `hf-megatron plan`."""
    from ..planner.devices import device, write_device
    from ..planner.measured_device import measure_device

    with failing():
        reference_device = device(like) if like else None
        measurement = measure_device(device_type or None, like=reference_device, seconds=seconds)
        write_device(measurement, output)
        typer.echo(output.read_text(encoding="utf-8"), nl=False)

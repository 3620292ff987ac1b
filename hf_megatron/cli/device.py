"""`hf-megatron measure-device`."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing


def measure_this_machine(
    output: Annotated[Path, typer.Argument(help="Output YAML file.")],
    like: Annotated[
        str, typer.Option(help="Built-in GPU type or YAML file with the memory, peak speed and links of this machine.")
    ] = "",
    device_type: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if available.")] = "",
    seconds: Annotated[float, typer.Option(help="Seconds per measurement.", min=0)] = 0.5,
) -> None:
    """Measure matrix products, copies and launches of this machine, for `hf-megatron plan --gpu FILE`."""
    from ..planner.devices import device, write_device
    from ..planner.measured_device import measure_device

    with failing():
        reference_device = device(like) if like else None
        measurement = measure_device(device_type or None, like=reference_device, seconds=seconds)
        write_device(measurement, output)
        typer.echo(output.read_text(encoding="utf-8"), nl=False)

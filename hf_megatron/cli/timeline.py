"""`hf-megatron timeline`."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing
from .options import Model, Schedule, VirtualStages, parse_pipeline_layout


def timeline(
    model: Model,
    output: Annotated[Path, typer.Option(help="Output folder of the plots.")],
    layout: Annotated[str, typer.Option(help="Parallel layout with pipeline stages, e.g. tp2+pp2+mb8.")] = "pp2+mb8",
    schedule: Schedule = "1f1b",
    virtual_stages: VirtualStages = None,
    layers: Annotated[int, typer.Option(help="Layers of the small model.", min=1)] = 8,
    hidden_size: Annotated[int | None, typer.Option(help="Hidden size of the small model.", min=1)] = None,
    global_batch_size: Annotated[int, typer.Option(help="Sequences per optimizer step.", min=1)] = 8,
    seq_length: Annotated[int, typer.Option(help="Sequence length, in tokens.", min=2)] = 64,
    steps: Annotated[int, typer.Option(help="Optimizer steps; the last one is drawn.", min=1)] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds before the ranks are stopped.", min=1)] = 300.0,
) -> None:
    """Run a small MODEL on a pipeline of CPU ranks and plot one step, with the measured and the theoretical bubble."""
    from ..errors import ConfigError
    from ..testing.pipeline_timeline import draw_timeline

    with failing():
        config = parse_pipeline_layout(layout, schedule, virtual_stages)
        if config.pp_size < 2:
            raise ConfigError(f"--layout {layout}: expected pp2 or more.")
        draw_timeline(
            model,
            config,
            output,
            layers=layers,
            hidden=hidden_size,
            batch_size=global_batch_size,
            sequence_length=seq_length,
            steps=steps,
            timeout=timeout,
            echo=typer.echo,
        )

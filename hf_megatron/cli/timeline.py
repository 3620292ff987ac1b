"""`hf-megatron timeline`."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing


def timeline(
    model: Annotated[str, typer.Argument(help="Model type, local folder or hub name; only its config is read.")],
    output: Annotated[Path, typer.Option(help="The folder for the pictures.")],
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", min=2)] = 2,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.", min=1)] = 8,
    schedule: Annotated[str, typer.Option(help="The order of forwards and backwards.")] = "1f1b",
    virtual_stages: Annotated[int | None, typer.Option(help="Stages per rank.", min=1)] = None,
    layers: Annotated[int, typer.Option(help="Layers of the small model.", min=1)] = 8,
    hidden: Annotated[int | None, typer.Option(help="Its hidden size.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Rows of a step, all microbatches together.", min=1)] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a row.", min=2)] = 64,
    steps: Annotated[int, typer.Option(help="Optimizer steps; the last one is drawn.", min=1)] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds.", min=1)] = 300.0,
) -> None:
    """Run a small MODEL on a pipeline of CPU ranks and draw one step, with measured and theoretical bubble."""
    from ..config import MegatronConfig
    from ..errors import RankError
    from ..testing.pipeline_timeline import draw_timeline

    with failing(RankError):
        config = MegatronConfig(
            pp_size=pp,
            tp_size=tp,
            num_microbatches=microbatches,
            pipeline_schedule=schedule,
            virtual_stages=virtual_stages,
        )
        draw_timeline(
            model,
            config,
            output,
            layers=layers,
            hidden=hidden,
            batch_size=batch_size,
            sequence_length=sequence_length,
            steps=steps,
            timeout=timeout,
            echo=typer.echo,
        )

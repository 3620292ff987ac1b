"""`hf-megatron debug`: recordings of a step compared."""

from pathlib import Path
from typing import Annotated

import typer

from .failure import failing

app = typer.Typer(help="Find out where a run goes wrong.", no_args_is_help=True)


@app.command("compare")
def compare_steps(
    first: Annotated[Path, typer.Argument(help="Folder of a recording of StepRecorder, taken for right.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one, of the same batch.")],
) -> None:
    """Say where two recordings of a step part first: exits with 1 where they differ."""
    from ..debug.divergence import compare_recordings

    with failing():
        found = compare_recordings(first, second)
        typer.echo(str(found))
    if found.differences:
        raise typer.Exit(1)

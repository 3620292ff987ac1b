"""Command line interface: `python -m tests.fuzz`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_megatron.cli.exit_codes import FAILURE, failing


def fuzz(
    seed: Annotated[int, typer.Option(help="A case depends on it and on its number alone.")] = 0,
    cases: Annotated[int | None, typer.Option(help="The last case's number; without a limit, 100.", min=1)] = None,
    minutes: Annotated[float | None, typer.Option(help="Ends after this time.", min=0)] = None,
    resume: Annotated[
        Path | None, typer.Option(help="A log in JSON lines, appended to; the cases in it are not run again.")
    ] = None,
    only: Annotated[str, typer.Option(help="Model types and loop patterns to draw, such as `llama,soft prompt`.")] = "",
    layouts: Annotated[str, typer.Option(help="Layouts to draw, such as `tp2,dp2+zero3`.")] = "",
    scripts: Annotated[Path | None, typer.Option(help="A folder for the scripts; else they are printed.")] = None,
    shrink: Annotated[bool, typer.Option(help="Make failing cases simpler, and write a script of each.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds per case.", min=1)] = 20.0,
) -> None:
    """Train random tiny models in random ways on CPU ranks and in one process, and print a script of what differs.

    Exit codes: 0 all equal or refused, 1 a finding, 2 wrong usage.
    """
    import warnings

    import torch
    from transformers.utils import logging

    from tests.fuzz.campaign import run_campaign
    from tests.fuzz.judging import ACCEPTED

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with failing():
        rows = run_campaign(
            seed=seed,
            cases=100 if cases is None and minutes is None else cases,
            minutes=minutes,
            log=resume,
            only=[name.strip() for name in only.split(",") if name.strip()],
            layouts=[name.strip() for name in layouts.split(",") if name.strip()],
            scripts=scripts,
            timeout=timeout,
            shrinks=shrink,
            echo=typer.echo,
        )
    if any(row["judgment"] not in ACCEPTED for row in rows):
        raise typer.Exit(FAILURE)


if __name__ == "__main__":
    typer.run(fuzz)

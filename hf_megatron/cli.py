"""`hf-megatron`: the command line. Heavy imports happen inside the commands, so that `--help` answers at once."""

import json
from pathlib import Path
from typing import Annotated

import typer

from . import cli_convert, cli_hub

app = typer.Typer(
    help="Megatron's parallelism for stock Hugging Face models.", no_args_is_help=True, add_completion=False
)

MISMATCH, USAGE = 1, 2


def _fail(message: str, code: int) -> "typer.Exit":
    typer.echo(message, err=True)
    return typer.Exit(code)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from .version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def check(
    models: Annotated[
        list[str], typer.Argument(help="Model types, local folders or hub names; `all` for every type with a plan.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 2,
    sp: Annotated[bool, typer.Option("--sp", help="With sequence parallelism.")] = False,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", min=1)] = 1,
    layouts: Annotated[
        str, typer.Option(help="Several layouts at once, such as `tp2,tp2+sp,pp2`; replaces --tp, --sp and --pp.")
    ] = "",
    class_name: Annotated[str, typer.Option("--class", help="A transformers class instead of the causal one.")] = "",
    task: Annotated[str, typer.Option(help="causal, masked, seq2seq or classification.")] = "causal",
    record: Annotated[Path | None, typer.Option(help="Write the results into this verified.json.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per layout.")] = 120.0,
) -> None:
    """Compare a tiny twin of MODELS on several CPU ranks with one process: loss, every gradient, updated weights.

    Exit codes: 0 all equal, 1 a mismatch, 2 wrong usage.
    """
    from .errors import MegatronError
    from .verify.check import check_models, parse_layouts

    try:
        wanted = parse_layouts(layouts or f"tp{tp}" + ("+sp" if sp else "") + f"+pp{pp}")
        rows = check_models(models, wanted, class_name=class_name or None, task=task, timeout=timeout, echo=typer.echo)
    except (MegatronError, ValueError, OSError) as error:
        raise _fail(str(error), USAGE) from None
    if record is not None:
        from .verify.results import write_results

        write_results(record, rows)
    passed = sum(row["passed"] for row in rows)
    typer.echo(f"{passed} of {len(rows)} cases equal one process")
    if passed < len(rows):
        raise typer.Exit(MISMATCH)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Model type, local folder or hub name.")],
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 2,
    sp: Annotated[bool, typer.Option("--sp", help="With sequence parallelism.")] = False,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", min=1)] = 1,
) -> None:
    """Print which axes split each parameter of MODEL and what its gradient needs; reads the config only."""
    from .errors import MegatronError
    from .verify.check import print_plan

    try:
        typer.echo(print_plan(model, tp, sp, pp))
    except (MegatronError, ValueError, OSError) as error:
        raise _fail(str(error), USAGE) from None


@app.command()
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
    timeout: Annotated[float, typer.Option(help="Seconds.")] = 300.0,
) -> None:
    """Run a small MODEL on a pipeline of CPU ranks and draw one step, with its bubble beside the formula's."""
    from .config import MegatronConfig
    from .errors import MegatronError, RankError
    from .verify.timeline import draw_timeline

    try:
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
    except RankError as error:
        raise _fail(str(error), MISMATCH) from None
    except (MegatronError, ValueError, OSError) as error:
        raise _fail(str(error), USAGE) from None


@app.command()
def env() -> None:
    """Print the versions that matter in a report."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for name in ("hf_megatron", "torch", "transformers", "accelerate", "safetensors", "peft", "trl", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    typer.echo(json.dumps(versions, indent=2))


app.command()(cli_convert.convert)
app.command()(cli_convert.verify)
app.command()(cli_convert.merge)
app.command()(cli_hub.push)
app.command()(cli_hub.pull)


def main() -> None:
    """Entry point of the `hf-megatron` command."""
    app()


if __name__ == "__main__":
    main()

"""`hf-megatron`: the command line. Commands import heavy modules lazily, so that `--help` is fast."""

from typing import Annotated

import typer

from . import check, conversion, data, debug, env, hub, plan, timeline
from .exit_codes import saying_interrupted

app = typer.Typer(
    help="Megatron's parallelism for stock Hugging Face models.", no_args_is_help=True, add_completion=False
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from ..compat.versions import __version__

        typer.echo(__version__)
        raise typer.Exit


for command in (
    check.check,
    plan.plan,
    timeline.timeline,
    env.env,
    conversion.convert,
    conversion.convert_adapter,
    conversion.compare,
    conversion.merge,
    hub.push,
    hub.pull,
):
    app.command()(command)
app.command("dry-run")(plan.dry_run_kinds)
app.add_typer(debug.app, name="debug")
app.add_typer(data.app, name="data")
app.command("measure-device")(env.measure_this_machine)


def main() -> None:
    """Runs the `hf-megatron` command; Ctrl-C ends it with a one-line message."""
    with saying_interrupted():
        app()

"""`hf-megatron`: the command line. Commands import heavy modules lazily, so that `--help` is fast."""

from typing import Annotated

import typer

from . import check, conversion, data, debug, device, env, hub, plan, timeline
from .exit_codes import reporting_interrupts
from .options import CHECKING, CHECKPOINTS, DATA, DEBUGGING, HUB, PLANNING

app = typer.Typer(
    help="Megatron-style parallelism for Hugging Face models.",
    epilog="Exit codes: 0 done, or the answer is yes; 1 the command failed, or the answer is no; 2 wrong usage.",
    no_args_is_help=True,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from ..compat.versions import __version__

        typer.echo(__version__)
        raise typer.Exit


# (panel, name, function, example arguments); the order of panels and commands in the help.
COMMANDS = (
    (PLANNING, "plan", plan.search, "meta-llama/Llama-3.1-70B --num-gpus 64 --gpu h100 --seq-length 8192"),
    (PLANNING, "show", plan.show, "llama --layout tp4+sp"),
    (PLANNING, "dry-run", plan.dry_run, "meta-llama/Llama-3.1-70B --num-gpus 64 --layout tp8+sp+pp4+zero1"),
    (PLANNING, "measure-device", device.measure_this_machine, "my_gpu.yaml --like h100"),
    (CHECKING, "check", check.check, "qwen3 --layout tp2,tp2+sp,pp2"),
    (CHECKING, "timeline", timeline.timeline, "llama --layout pp2+mb8 --schedule zbv --output timelines"),
    (CHECKING, "new-family", check.new_family, "lilt > hf_megatron/models/families/lilt.py"),
    (CHECKPOINTS, "convert", conversion.convert, "meta-llama/Llama-3.1-8B llama-core --to megatron_core --layout tp8"),
    (CHECKPOINTS, "compare", conversion.compare, "meta-llama/Llama-3.1-8B llama-core"),
    (CHECKPOINTS, "merge", conversion.merge_checkpoint, "outputs/checkpoint-500 merged"),
    (CHECKPOINTS, "convert-adapter", conversion.convert_adapter, "lora bridge-lora --to bridge --base model"),
    (HUB, "push", hub.push, "outputs/checkpoint-500 me/run"),
    (HUB, "pull", hub.pull, "me/run checkpoint --layout tp2+pp2 --ranks 0-1"),
    (DEBUGGING, "env", env.env, "--patches"),
)
for panel, name, function, example in COMMANDS:
    app.command(name, rich_help_panel=panel, epilog=f"Example: hf-megatron {name} {example}".rstrip())(function)
app.add_typer(data.app, name="data", rich_help_panel=DATA)
app.add_typer(debug.app, name="debug", rich_help_panel=DEBUGGING)


def main() -> None:
    """Runs the `hf-megatron` command; Ctrl-C ends it with a one-line message."""
    with reporting_interrupts():
        app()

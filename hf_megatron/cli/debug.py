"""`hf-megatron debug`: compares, merges and reports recordings of a run."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import FAILURE, failing

app = typer.Typer(help="Compare, trace and report recordings of a run.", no_args_is_help=True)


@app.command("compare", epilog="Example: hf-megatron debug compare recordings/single recordings/tp2")
def compare_steps(
    first: Annotated[Path, typer.Argument(help="Recording folder of a StepRecorder, used as the reference.")],
    second: Annotated[Path, typer.Argument(help="Recording folder of the same batch to compare.")],
) -> None:
    """Print where two recordings of a training step first diverge."""
    from ..diagnostics.divergence import compare_recordings

    with failing():
        comparison = compare_recordings(first, second)
        typer.echo(str(comparison))
    if comparison.differences:
        raise typer.Exit(FAILURE)


@app.command("trace", epilog="Example: hf-megatron debug trace traces")
def merge_traces(
    directory: Annotated[Path, typer.Argument(help="Folder with the StepTrace traces of all ranks.")],
    output: Annotated[
        Path | None, typer.Option(help="Merged trace for ui.perfetto.dev; default: trace.json in the folder.")
    ] = None,
) -> None:
    """Print each rank's computation, communication and waiting time of a step, and merge the ranks' traces."""
    from ..diagnostics.rank_trace import traces_in
    from ..diagnostics.trace_breakdown import as_table, compute_shares, write_merged

    with failing():
        traces = traces_in(directory)
        path = output or directory / "trace.json"
        write_merged(traces, path)
        typer.echo(as_table(compute_shares(traces)))
        typer.echo(f"{path}: open it in ui.perfetto.dev")


@app.command("memory", epilog="Example: hf-megatron debug memory memory")
def compare_memory(
    directory: Annotated[Path, typer.Argument(help="Folder with the StepMemory records of all ranks.")],
) -> None:
    """Print the memory that each rank used in a step, and the memory that `plan` predicts for it."""
    from ..core.fork_harness import first_reason
    from ..diagnostics.step_memory import memory_in
    from ..errors import RankError
    from ..planner.memory_report import memory_table, plan_for

    with failing():
        rank_memories, planned, reason = memory_in(directory), None, "some parameters are frozen"
        if rank_memories[0].trains_all:
            try:
                planned = plan_for(rank_memories[0])
            except RankError as error:
                reason = first_reason(str(error))
        typer.echo(memory_table(rank_memories, planned))
        if planned is None:
            typer.echo(f"no planned memory: {reason}")


@app.command("hang", epilog="Example: hf-megatron debug hang flight_records")
def read_hang(
    directory: Annotated[Path, typer.Argument(help="Folder with the flight records of a job that hung.")],
) -> None:
    """Print which ranks are missing from which collective."""
    from ..diagnostics.hang import find_discords, read_flight_records, tell_hang

    with failing():
        records = read_flight_records(directory)
        typer.echo(tell_hang(records))
    if find_discords(records):
        raise typer.Exit(FAILURE)


@app.command("report", epilog="Example: hf-megatron debug report outputs/run")
def make_report(
    directory: Annotated[Path, typer.Argument(help="Folder of a run recorded by RunCallback.")],
    output: Annotated[Path | None, typer.Option(help="Output HTML file; default: page.html in the folder.")] = None,
    plan: Annotated[bool, typer.Option(help="Add the memory that `plan` predicts for the recorded step.")] = True,
) -> None:
    """Write an HTML report of a run: layout, losses, throughput, time and memory per step, slow ranks."""
    from ..core.fork_harness import first_reason
    from ..diagnostics.run_record import read_run
    from ..diagnostics.run_report import write_page
    from ..errors import RankError
    from ..planner.memory_report import plan_for

    with failing():
        run, planned = read_run(directory), {}
        if plan and run.memory and run.memory[0].trains_all:
            try:
                planned = {one.pipeline_rank: one.peak.size for one in plan_for(run.memory[0])}
            except RankError as error:
                typer.echo(f"no planned memory: {first_reason(str(error))}")
        path = output or directory / "page.html"
        write_page(run, path, planned)
        typer.echo(path)

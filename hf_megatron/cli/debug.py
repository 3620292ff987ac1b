"""`hf-megatron debug`: compares, merges and reports recordings of a run."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing

app = typer.Typer(help="Find out where a run goes wrong.", no_args_is_help=True)


@app.command("compare")
def compare_steps(
    first: Annotated[Path, typer.Argument(help="Folder of a recording of StepRecorder, taken for right.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one, of the same batch.")],
) -> None:
    """Print where two recordings of a step first diverge; exits with 1 if they differ."""
    from ..diagnostics.divergence import compare_recordings

    with failing():
        comparison = compare_recordings(first, second)
        typer.echo(str(comparison))
    if comparison.differences:
        raise typer.Exit(1)


@app.command("trace")
def merge_traces(
    directory: Annotated[Path, typer.Argument(help="Folder of the traces of a step by StepTrace, of all ranks.")],
    output: Annotated[
        Path | None, typer.Option(help="Merged trace for ui.perfetto.dev; by default trace.json in the folder.")
    ] = None,
) -> None:
    """Print each rank's time in computation, communication and waiting in a step, and merge the ranks' traces."""
    from ..diagnostics.rank_trace import traces_in
    from ..diagnostics.trace_breakdown import as_table, compute_shares, write_merged

    with failing():
        traces = traces_in(directory)
        path = output or directory / "trace.json"
        write_merged(traces, path)
        typer.echo(as_table(compute_shares(traces)))
        typer.echo(f"{path}: open it in ui.perfetto.dev")


@app.command("memory")
def compare_memory(
    directory: Annotated[Path, typer.Argument(help="Folder of what StepMemory counted in a step, of all ranks.")],
) -> None:
    """Print the memory that the ranks of a run used in a step, and the memory that was planned for them."""
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


@app.command("hang")
def read_hang(
    directory: Annotated[Path, typer.Argument(help="Folder of the flight records of a job that stood still.")],
) -> None:
    """Print which ranks are missing in which collective; exits with 1 if there are any."""
    from ..diagnostics.hang import find_discords, read_flight_records, tell_hang

    with failing():
        records = read_flight_records(directory)
        typer.echo(tell_hang(records))
    if find_discords(records):
        raise typer.Exit(1)


@app.command("report")
def make_report(
    directory: Annotated[Path, typer.Argument(help="Folder of a run that RunCallback recorded.")],
    output: Annotated[Path | None, typer.Option(help="HTML file; by default page.html in the folder.")] = None,
    plan: Annotated[bool, typer.Option(help="Plan the recorded step's memory, to be shown with it.")] = True,
) -> None:
    """Write the report of a run: layout, losses, speed, time and memory of a step, slow ranks."""
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

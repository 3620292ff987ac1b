"""`hf-megatron convert`, `compare` and `merge`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .exit_codes import MISMATCH, ended_at_once, failing


@contextmanager
def _bar(what: str | None = None) -> Iterator[Any]:
    from tqdm.auto import tqdm

    with tqdm(desc=what, unit="B", unit_scale=True, delay=1.0) as bar:
        try:
            yield bar
        except KeyboardInterrupt:
            # If Ctrl-C interrupts a draw, tqdm has not recorded it and would not end the line; mark the bar as drawn.
            bar.last_print_t = max(bar.last_print_t, bar.start_t + bar.delay)
            raise


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint's folder, of any format, or a model of the Hub.")],
    target: Annotated[str, typer.Argument(help="The folder to write; must not exist.")],
    to: Annotated[
        str, typer.Option(help="hf, sharded, megatron_core (torch_dist), megatron_legacy (torch), dcp or shards.")
    ],
    from_format: Annotated[str, typer.Option("--from", help="The source's format; recognised by default.")] = "",
    config: Annotated[
        str, typer.Option(help="A folder or a model of the Hub with the config.json, where SOURCE has none.")
    ] = "",
    tp: Annotated[int, typer.Option(help="Tensor parallel size that the target is padded or split for.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size of megatron_legacy.")] = 1,
    ep: Annotated[
        int, typer.Option(help="Expert parallel size of megatron_legacy, and for moments of megatron_core.")
    ] = 1,
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="As in Megatron-LM: its vocabulary is padded to a multiple of this times --tp.")
    ] = 128,
    local_names: Annotated[
        bool, typer.Option("--local-names", help="megatron_legacy for --transformer-impl local.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file of hf, such as 5GB.")] = "5GB",
    optimizer: Annotated[bool, typer.Option(help="Bring moments along where both sides have them.")] = True,
    without_mtp: Annotated[
        bool,
        typer.Option("--without-mtp", help="Leave out layers that predict further tokens, and say how many."),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--dry-run", help="Print every mapping and size; read and write nothing.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare source and target tensor by tensor.")] = False,
    logits: Annotated[bool, typer.Option("--logits", help="With --verify: compare logits too.")] = False,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Do not compare the source with its checksums first.")
    ] = False,
) -> None:
    """Write the checkpoint SOURCE in another format: weights, and optimizer moments if both formats have them.

    Exit codes: 0 done, 1 damaged, unsafe or unfitting input, 2 wrong usage.
    """
    with ExitStack() as reading:
        # Ctrl-C may end the process at once until writing starts.
        reading.enter_context(ended_at_once())
        from ..conversion import Report, TargetOptions, convert, plan_conversion
        from ..errors import CheckpointError

        with failing(CheckpointError, OSError), ExitStack() as bars:
            options = TargetOptions(tp, pp, ep, make_vocab_size_divisible_by, max_shard_size, local_names)
            kwargs: dict[str, Any] = {"from_format": from_format or None, "config": config or None}
            kwargs |= {"options": options, "optimizer": optimizer, "without_mtp": without_mtp}
            if plan:
                typer.echo(plan_conversion(source, target, to, **kwargs).table())
                return
            bar = bars.enter_context(_bar())
            stages: dict[str, Any] = {}

            def describe(planned: Report) -> None:
                reading.close()
                bar.set_description(f"{planned.source.format.name} -> {planned.format.name}", refresh=False)
                bar.total = planned.nbytes

            def check(what: str, size: int, total: int) -> None:
                if what not in stages:
                    bars.close()
                    stages[what] = bars.enter_context(_bar(what))
                    stages[what].total = total
                stages[what].update(size)

            kwargs |= {"verify": verify, "logits": logits, "checksums": not no_checksums}
            report = convert(source, target, to, on_plan=describe, on_tensor=bar.update, on_check=check, **kwargs)
    for note in report.notes:
        typer.echo(note)
    if report.comparison is not None:
        typer.echo(report.comparison.summary())
    typer.echo(report.target)


def compare(
    first: Annotated[str, typer.Argument(help="A checkpoint's folder, of any format, or a model of the Hub.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    config: Annotated[str, typer.Option(help="Where the config.json is, if neither has one.")] = "",
    logits: Annotated[bool, typer.Option("--logits", help="Compare logits through transformers too.")] = False,
    without_mtp: Annotated[
        bool,
        typer.Option("--without-mtp", help="Leave out layers that predict further tokens, and say how many."),
    ] = False,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor.

    Exit codes: 0 equal, 1 different or damaged, 2 wrong usage.
    """
    with ended_at_once():
        from ..conversion import compare
        from ..errors import CheckpointError

        with failing(CheckpointError, OSError), _bar("comparing") as bar:
            kwargs: dict[str, Any] = {"config": config or None, "logits": logits, "without_mtp": without_mtp}
            comparison = compare(first, second, on_tensor=bar.update, **kwargs)
    typer.echo(comparison.summary())
    if not comparison.equal:
        raise typer.Exit(MISMATCH)


def convert_adapter(
    source: Annotated[str, typer.Argument(help="An adapter's folder of PEFT, or a checkpoint of Megatron-Bridge.")],
    target: Annotated[str, typer.Argument(help="The folder to write; must not exist.")],
    to: Annotated[str, typer.Option(help="peft, bridge (fused) or bridge_canonical.")],
    base: Annotated[str, typer.Option(help="A folder with the base's config.json.")],
) -> None:
    """Write the LoRA adapter SOURCE for PEFT or for Megatron-Bridge.

    Exit codes: 0 done, 1 damaged or unfitting input, 2 wrong usage.
    """
    from ..conversion import adapters
    from ..errors import CheckpointError

    with failing(CheckpointError, OSError):
        written = adapters.convert_adapter(source, target, to, base)
    typer.echo(f"{len(written)} tensors")
    typer.echo(target)


def merge(
    checkpoint: Annotated[Path, typer.Argument(help="A sharded checkpoint of Trainer or Accelerator.save_state.")],
    out: Annotated[str, typer.Argument(help="The folder to write; must not exist.")],
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 5GB.")] = "50GB",
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not compare checksums first.")] = False,
) -> None:
    """Write the weights of a sharded CHECKPOINT as Hugging Face files: `convert --from sharded --to hf`."""
    with ExitStack() as reading:
        reading.enter_context(ended_at_once())
        from ..conversion import TargetOptions, convert
        from ..errors import CheckpointError

        with failing(CheckpointError, OSError):
            kwargs: dict[str, Any] = {"options": TargetOptions(max_shard_size=max_shard_size)}
            kwargs |= {"from_format": "sharded", "checksums": not no_verify}
            report = convert(checkpoint, out, "hf", on_plan=lambda planned: reading.close(), **kwargs)
    typer.echo(report.target)

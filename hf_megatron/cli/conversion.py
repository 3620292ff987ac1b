"""`hf-megatron convert`, `compare` and `merge`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .exit_codes import FAILURE, failing, interrupting_at_once
from .options import MaxShardSize, NoChecksums, Source, Target, WithoutMtp, parse_sizes


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
    source: Source,
    target: Target,
    to: Annotated[
        str,
        typer.Option(
            help="Output format: hf, sharded, megatron_core (torch_dist), megatron_legacy (torch), dcp or shards."
        ),
    ],
    from_format: Annotated[str, typer.Option("--from", help="Format of SOURCE; default: detected.")] = "",
    config: Annotated[
        str, typer.Option(help="Folder or Hub repository with the config.json, if SOURCE has none.")
    ] = "",
    layout: Annotated[
        str, typer.Option(help="Layout of the Megatron job, e.g. tp2+pp2+ep2, to pad or split the tensors for.")
    ] = "tp1",
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(help="As in Megatron-LM: the vocabulary is padded to a multiple of this times tp.")
    ] = 128,
    local_names: Annotated[
        bool, typer.Option("--local-names", help="megatron_legacy: names for --transformer-impl local.")
    ] = False,
    max_shard_size: MaxShardSize = "5GB",
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave out the optimizer states.")] = False,
    without_mtp: WithoutMtp = False,
    plan: Annotated[bool, typer.Option("--dry-run", help="Print every mapping and size, and write nothing.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare source and target tensor by tensor.")] = False,
    logits: Annotated[bool, typer.Option("--logits", help="With --verify: compare logits as well.")] = False,
    no_checksums: NoChecksums = False,
) -> None:
    """Convert a checkpoint to another format: weights, and optimizer states if both formats have them."""
    with ExitStack() as reading:
        # Ctrl-C may end the process at once until writing starts.
        reading.enter_context(interrupting_at_once())
        from ..conversion import Report, TargetOptions, convert, plan_conversion

        with failing(), ExitStack() as bars:
            sizes = parse_sizes(layout, "tp_size", "pp_size", "ep_size")
            tp, pp, ep = (sizes.get(name, 1) for name in ("tp_size", "pp_size", "ep_size"))
            options = TargetOptions(tp, pp, ep, make_vocab_size_divisible_by, max_shard_size, local_names)
            kwargs: dict[str, Any] = {"from_format": from_format or None, "config": config or None}
            kwargs |= {"options": options, "optimizer": not no_optimizer, "without_mtp": without_mtp}
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
        typer.echo("\n".join(report.comparison.summary_lines()))
    typer.echo(report.target)


def compare(
    first: Source,
    second: Source,
    config: Annotated[
        str, typer.Option(help="Folder or Hub repository with the config.json, if neither has one.")
    ] = "",
    logits: Annotated[bool, typer.Option("--logits", help="Compare the logits of both models as well.")] = False,
    without_mtp: WithoutMtp = False,
) -> None:
    """Compare two checkpoints of any formats tensor by tensor."""
    with interrupting_at_once():
        from ..conversion import compare

        with failing(), _bar("comparing") as bar:
            kwargs: dict[str, Any] = {"config": config or None, "logits": logits, "without_mtp": without_mtp}
            comparison = compare(first, second, on_tensor=bar.update, **kwargs)
    typer.echo("\n".join(comparison.summary_lines()))
    if not comparison.equal:
        raise typer.Exit(FAILURE)


def convert_adapter(
    source: Annotated[str, typer.Argument(help="PEFT adapter folder, or Megatron-Bridge checkpoint.")],
    target: Target,
    to: Annotated[str, typer.Option(help="Output format: peft, bridge (fused) or bridge_canonical.")],
    base: Annotated[str, typer.Option(help="Folder with the base model's config.json.")],
) -> None:
    """Convert a LoRA adapter between PEFT and Megatron-Bridge."""
    from ..conversion import adapters

    with failing():
        written = adapters.convert_adapter(source, target, to, base)
    typer.echo(f"{len(written)} tensors")
    typer.echo(target)


def merge_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="Sharded checkpoint of Trainer or Accelerator.save_state.")],
    target: Target,
    max_shard_size: MaxShardSize = "5GB",
    no_checksums: NoChecksums = False,
) -> None:
    """Merge a sharded checkpoint's weights into Hugging Face files; same as `convert --from sharded --to hf`."""
    with ExitStack() as reading:
        reading.enter_context(interrupting_at_once())
        from ..conversion import TargetOptions, convert
        from ..errors import CheckpointError

        with failing():
            if not checkpoint.is_dir():
                raise CheckpointError(f"{checkpoint} is not a folder.")
            kwargs: dict[str, Any] = {"options": TargetOptions(max_shard_size=max_shard_size)}
            kwargs |= {"from_format": "sharded", "checksums": not no_checksums}
            report = convert(checkpoint, target, "hf", on_plan=lambda planned: reading.close(), **kwargs)
    typer.echo(report.target)

"""`hf-megatron push` and `pull`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing
from .options import Schedule, VirtualStages, parse_sizes


def push(
    folder: Annotated[Path, typer.Argument(help="Sharded checkpoint, or folder of Hugging Face files.")],
    repo: Annotated[str, typer.Argument(help="Name or owner/name; created if missing.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; created if missing.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Push a checkpoint to the Hub in one commit.

    After an interruption the same command uploads only what is missing.
    """
    from ..integrations.hub.push import push_folder

    with failing():
        info = push_folder(
            folder, repo, private=private or None, revision=revision, create_pr=create_pr, commit_message=message
        )
    typer.echo(info.pr_url or info.commit_url)


def pull(
    repo: Annotated[str, typer.Argument(help="Owner/name of a repository with a checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Output folder; created if missing.")],
    layout: Annotated[str, typer.Option(help="Parallel layout of the job, e.g. tp2+pp2+dp4.")] = "",
    ranks: Annotated[
        str, typer.Option(help="Ranks of the layout whose files are needed, e.g. 0-3 or 0,2; default: all files.")
    ] = "",
    schedule: Schedule = "1f1b",
    virtual_stages: VirtualStages = None,
    config: Annotated[Path | None, typer.Option(help="MegatronConfig as YAML or JSON, instead of --layout.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave out the optimizer states.")] = False,
) -> None:
    """Download a checkpoint from the Hub, or only the files that some ranks need, and verify each file."""
    from ..config import MegatronConfig
    from ..errors import ConfigError
    from ..integrations.hub.pull import pull_checkpoint

    with failing():
        if config is not None:
            if layout:
                raise ConfigError(f"--layout {layout} and --config {config} exclude each other. Pass one of them.")
            job_config = MegatronConfig.coerce(str(config))
        else:
            sizes = parse_sizes(layout, "tp_size", "pp_size", "dp_size", "zero_stage") if layout else {}
            job_config = replace(
                MegatronConfig(**{"dp_size": 1, "zero_stage": 1, **sizes}),
                pipeline_schedule=schedule,
                virtual_stages=virtual_stages,
            )
        rank_indices = parse_ranks(ranks) if ranks else None
        pulled = pull_checkpoint(
            repo, target, config=job_config, rank=rank_indices, revision=revision, optimizer=not no_optimizer
        )
    typer.echo(
        f"{pulled.path}: {len(pulled.files)} files, {pulled.bytes} of {pulled.total_bytes} bytes "
        f"({pulled.fetched_bytes} fetched now), commit {pulled.commit}"
    )


def parse_ranks(text: str) -> list[int]:
    """Parses `0-3,6` as `[0, 1, 2, 3, 6]`.

    Raises:
        ConfigError: the text has another form.
    """
    from ..errors import ConfigError

    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
            raise ConfigError(f"--ranks {text!r}: expected comma-separated ranks and ranges such as 0-3,6.")
        ranks.extend(range(int(first), int(last or first) + 1))
    return list(dict.fromkeys(ranks))

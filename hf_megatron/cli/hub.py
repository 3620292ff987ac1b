"""`hf-megatron push` and `pull`."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing


def push(
    folder: Annotated[Path, typer.Argument(help="A sharded checkpoint, or Hugging Face files.")],
    repo: Annotated[str, typer.Argument(help="Name or owner/name; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; made if it does not exist.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Push FOLDER to REPO in one commit; run again after an interruption, it uploads only what is missing.

    Exit codes: 0 pushed, 1 rejected or failed, 2 wrong usage.
    """
    from ..errors import MegatronError
    from ..integrations.hub.push import push_folder

    with failing(MegatronError, OSError):
        info = push_folder(
            folder, repo, private=private or None, revision=revision, create_pr=create_pr, commit_message=message
        )
    typer.echo(info.pr_url or info.commit_url)


def pull(
    repo: Annotated[str, typer.Argument(help="Owner/name of a repository with a checkpoint.")],
    target: Annotated[Path, typer.Argument(help="The folder to fill; made if it does not exist.")],
    ranks: Annotated[str, typer.Option(help="Ranks of the layout to pull for, such as 0-3 or 0,2; all without.")] = "",
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="Data parallel size.", min=1)] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage.", min=0, max=3)] = 1,
    schedule: Annotated[str, typer.Option(help="Pipeline schedule; some place stages in another order.")] = "1f1b",
    virtual_stages: Annotated[int | None, typer.Option(help="Stages per rank.", min=1)] = None,
    config: Annotated[Path | None, typer.Option(help="MegatronConfig as YAML or JSON, in place of the sizes.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Without the optimizer's state.")] = False,
) -> None:
    """Download the checkpoint of REPO into TARGET, or only the files that RANKS of a layout need, and verify each file.

    Exit codes: 0 pulled, 1 rejected or failed, 2 wrong usage.
    """
    from ..config import MegatronConfig
    from ..errors import MegatronError
    from ..integrations.hub.pull import pull_checkpoint

    with failing(MegatronError, OSError):
        if config is not None:
            layout = MegatronConfig.coerce(str(config))
        else:
            layout = MegatronConfig(
                tp_size=tp,
                pp_size=pp,
                dp_size=dp,
                zero_stage=zero,
                pipeline_schedule=schedule,
                virtual_stages=virtual_stages,
            )
        rank_indices = parse_ranks(ranks) if ranks else None
        pulled = pull_checkpoint(
            repo, target, config=layout, rank=rank_indices, revision=revision, optimizer=not no_optimizer
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

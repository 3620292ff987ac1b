"""`model.push_to_hub` and Trainer's pushes of a laid out model, and loading what a rank pulled.

Stock calls them on every rank, and each makes a temporary directory, a repository and a commit of its own; Trainer
pushes from the first rank alone, so that the others never hear of an error, and pickles its arguments on the way.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers.utils.hub import create_and_tag_model_card

from ...checkpoint.reader import PARTIAL, read_partial
from ...core.communication.rank_errors import gather, propagate_errors, rank_and_size
from ...errors import CheckpointError, UnsupportedError
from ...parallel_state import parallel_state
from .pulled_folder import PART
from .push import push_folder
from .push_selection import CARD, INDEX

# What stock leaves out of the folder it pushes.
_IGNORED = ("_*", "checkpoint-*")


def push_to_hub(original: Callable, self: Any, repo_id: str, **kwargs: Any) -> Any:
    """Pushes the merged weights and a card; every rank calls it with stock's arguments and gets the same commit."""
    return (original if parallel_state(self) is None else _push_model)(self, repo_id, **kwargs)


def push_saved(directory: str, token: str | bool | None, arguments: dict[str, Any]) -> None:
    """Does what `save_pretrained(push_to_hub=True)` does behind the save, with its keyword arguments."""
    push_folder(
        directory,
        arguments.get("repo_id") or os.path.basename(os.path.normpath(directory)),
        token=token,
        private=arguments.get("private"),
        revision=arguments.get("revision"),
        create_pr=arguments.get("create_pr", False),
        commit_message=arguments.get("commit_message") or "Upload model",
    )


def _push_model(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str | None = "50GB",
    tags: list[str] | str | None = None,
) -> Any:
    first = rank_and_size(None)[0] == 0
    with propagate_errors(f"Pushing to {repo_id}"):
        # The ranks of a host share it; on others it is an empty folder that goes at the end.
        made = tempfile.mkdtemp(prefix="hf_megatron_push_") if first else None
    directory = Path(gather(made, None, f"Pushing to {repo_id}")[0])
    try:
        with propagate_errors(f"Pushing to {repo_id}"):
            if first:
                _fetch_card(repo_id, directory, private, token)
        # A card of somebody else is kept, ours is written anew.
        model.save_pretrained(directory, max_shard_size=max_shard_size, repo_id=repo_id)
        with propagate_errors(f"Making the card of {repo_id}"):
            if first:
                wanted = [tags] if isinstance(tags, str) else list(tags or ())
                _tag_card(repo_id, directory, [*(model.model_tags or ()), *wanted], token)
        return push_folder(
            directory,
            repo_id,
            token=token,
            private=private,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fetch_card(repo_id: str, directory: Path, private: bool | None, token: bool | str | None) -> None:
    """Puts the card of the repository into the directory; a repository that does not exist is made."""
    # A short name belongs to whom the token belongs to.
    repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
    with suppress(EntryNotFoundError):
        ModelCard.load(repo_id, token=_text(token)).save(directory / CARD)


def _tag_card(repo_id: str, directory: Path, tags: list[str], token: bool | str | None) -> None:
    """Adds tags to the card; where none was written it is stock's."""
    path = directory / CARD
    if not path.is_file():
        create_and_tag_model_card(repo_id, tags or None, token=_text(token)).save(path)
    elif tags:
        card = ModelCard.load(path)
        card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), *tags]))
        card.save(path)


def _text(token: bool | str | None) -> str | None:
    return token if isinstance(token, str) else None


def init_hf_repo(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the repository; an error of the first rank reaches all, and all know the repository's name."""
    state = parallel_state(self.model)
    if state is None:
        return original(self, *args, **kwargs)
    strategy = self.args.hub_strategy.value
    if self.args.push_to_hub and state.config.async_save and strategy != "end":
        raise UnsupportedError(
            f"TrainingArguments.hub_strategy = {strategy!r} with "
            "MegatronConfig(async_save=True): every push needs all ranks, which go on training meanwhile. Use "
            "hub_strategy='end', or async_save=False."
        )
    with propagate_errors("Making the repository of TrainingArguments.push_to_hub"):
        original(self, *args, **kwargs)
    self.hub_model_id = gather(self.hub_model_id, None, "Making the repository")[0]
    self.push_in_progress = None


def trainer_push_to_hub(
    original: Callable,
    self: Any,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    private: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Pushes the output folder and returns the commit on all ranks when all is there, `blocking=False` or not."""
    if parallel_state(self.model) is None:
        return original(self, commit_message, blocking, token, revision, private, **kwargs)
    self.callback_handler.on_push_begin(self.args, self.state, self.control)
    if self.hub_model_id is None:
        self.init_hf_repo(token=token, private=private)
    self.save_model(_internal_call=True)
    kwargs.setdefault("model_name", self.hub_model_id.split("/")[-1])
    if model_tags := self.model.model_tags:
        given = kwargs.get("tags") or []
        kwargs["tags"] = list(dict.fromkeys([*([given] if isinstance(given, str) else given), *model_tags]))
    with propagate_errors("Making the model card"):
        self.create_model_card(**kwargs)
    return _push_output(self, commit_message, token, revision, private)


def _push_output(
    trainer: Any, message: str | None, token: str | None, revision: str | None, private: bool | None
) -> Any:
    args = trainer.args
    return push_folder(
        args.output_dir,
        trainer.hub_model_id,
        token=token or args.hub_token,
        private=args.hub_private_repo if private is None else private,
        revision=revision or args.hub_revision,
        commit_message=message,
        ignore=_IGNORED,
    )


def push_from_checkpoint(original: Callable, self: Any, checkpoint_folder: str) -> None:
    """Pushes merged weights and, as the strategy says, the checkpoint; training waits."""
    if parallel_state(self.model) is None:
        return original(self, checkpoint_folder)
    args = self.args
    strategy = args.hub_strategy.value
    if strategy == "end":
        return
    self.callback_handler.on_push_begin(args, self.state, self.control)
    # The checkpoint's own weights are in shards, which `from_pretrained(repo)` does not read.
    self.save_model(_internal_call=True)
    message = f"Training in progress, step {self.state.global_step}"
    _push_output(self, message, None, None, None)
    if strategy in ("checkpoint", "all_checkpoints"):
        push_folder(
            checkpoint_folder,
            self.hub_model_id,
            token=args.hub_token,
            revision=args.hub_revision,
            commit_message=f"{message}, checkpoint",
            path_in_repo="last-checkpoint" if strategy == "checkpoint" else Path(checkpoint_folder).name,
        )


def readable_part(path: Any) -> Any:
    """Returns what transformers reads where `path` was pulled for a pipeline stage only (see `PART`); else `path`."""
    return os.path.join(path, PART) if path is not None and (Path(path) / PART / INDEX).is_file() else path


def check_part(model: Any, info: dict[str, Any], path: Any) -> None:
    """Raises for weights that a partial folder lacks, whatever `strict_loading` says: they exist, elsewhere."""
    if path is None or not os.path.isdir(path) or not (off_stage := read_partial(Path(path))):
        return
    # Where the weights came from, and not the folder that stood in for it.
    model.config._name_or_path = model.name_or_path = os.fspath(path)
    if missing := sorted(info.get("missing_keys") or ()):
        raise CheckpointError(
            f"{path} was pulled for other ranks or another layout ({PARTIAL}): {', '.join(missing[:5])} lie in "
            f"{', '.join(sorted(off_stage))}. Run `hf-megatron pull` for this layout."
        )

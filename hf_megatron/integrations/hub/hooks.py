"""Collective replacements of `model.push_to_hub` and Trainer's pushes, and loading of partially pulled folders.

Upstream calls `push_to_hub` on every rank, each with its own temporary directory, repository and commit. Trainer pushes
from the first rank alone, so that errors do not reach the other ranks, and pickles its arguments into the folder.
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

# Patterns that upstream leaves out of the folder it pushes.
_IGNORED = ("_*", "checkpoint-*")


def push_to_hub(original: Callable, self: Any, repo_id: str, **kwargs: Any) -> Any:
    """Pushes the merged weights and a card; a collective call with upstream's arguments and return value."""
    return (original if parallel_state(self) is None else _push_model)(self, repo_id, **kwargs)


def push_saved(directory: str, token: str | bool | None, arguments: dict[str, Any]) -> None:
    """Implements the push of `save_pretrained(push_to_hub=True)` after the save, with its keyword arguments."""
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
        # The ranks of a host share the folder; on other hosts it is an empty folder, removed at the end.
        temp_dir = tempfile.mkdtemp(prefix="hf_megatron_push_") if first else None
    directory = Path(gather(temp_dir, None, f"Pushing to {repo_id}")[0])
    try:
        with propagate_errors(f"Pushing to {repo_id}"):
            if first:
                _fetch_card(repo_id, directory, private, token)
        # A card written by users is kept; a generated one is rewritten.
        model.save_pretrained(directory, max_shard_size=max_shard_size, repo_id=repo_id)
        with propagate_errors(f"Creating the model card of {repo_id}"):
            if first:
                tag_list = [tags] if isinstance(tags, str) else list(tags or ())
                _tag_card(repo_id, directory, [*(model.model_tags or ()), *tag_list], token)
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
    """Downloads the repository's card into the directory; creates the repository if missing."""
    # A repository name without an owner belongs to the token's user.
    repo_id = HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
    with suppress(EntryNotFoundError):
        ModelCard.load(repo_id, token=_text(token)).save(directory / CARD)


def _tag_card(repo_id: str, directory: Path, tags: list[str], token: bool | str | None) -> None:
    """Adds tags to the card, or writes upstream's card if there is none."""
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
    """Creates the repository; an error of the first rank is raised on all ranks, and all learn the repository's id."""
    state = parallel_state(self.model)
    if state is None:
        return original(self, *args, **kwargs)
    strategy = self.args.hub_strategy.value
    if self.args.push_to_hub and state.config.async_save and strategy != "end":
        raise UnsupportedError(
            f"TrainingArguments.hub_strategy = {strategy!r} is not supported with MegatronConfig(async_save=True): "
            "each push needs all ranks, which continue training meanwhile. Use hub_strategy='end', or "
            "async_save=False."
        )
    with propagate_errors("Creating the repository for TrainingArguments.push_to_hub"):
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
    """Pushes the output folder and returns the commit on all ranks; always blocks, even with `blocking=False`."""
    if parallel_state(self.model) is None:
        return original(self, commit_message, blocking, token, revision, private, **kwargs)
    self.callback_handler.on_push_begin(self.args, self.state, self.control)
    if self.hub_model_id is None:
        self.init_hf_repo(token=token, private=private)
    self.save_model(_internal_call=True)
    kwargs.setdefault("model_name", self.hub_model_id.split("/")[-1])
    if model_tags := self.model.model_tags:
        extra_tags = kwargs.get("tags") or []
        kwargs["tags"] = list(
            dict.fromkeys([*([extra_tags] if isinstance(extra_tags, str) else extra_tags), *model_tags])
        )
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
    """Pushes merged weights and, depending on the strategy, the checkpoint; training waits."""
    if parallel_state(self.model) is None:
        return original(self, checkpoint_folder)
    args = self.args
    strategy = args.hub_strategy.value
    if strategy == "end":
        return
    self.callback_handler.on_push_begin(args, self.state, self.control)
    # The checkpoint stores sharded weights, which `from_pretrained(repo)` does not read.
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
    """Returns the subfolder (see `PART`) that transformers reads for a partially pulled folder; otherwise `path`."""
    return os.path.join(path, PART) if path is not None and (Path(path) / PART / INDEX).is_file() else path


def check_part(model: Any, info: dict[str, Any], path: Any) -> None:
    """Raises `CheckpointError` for weights missing from a partial folder, whatever `strict_loading` is.

    Without this check they would be initialized at random although the repository has them.
    """
    if path is None or not os.path.isdir(path) or not (omitted := read_partial(Path(path))):
        return
    # Record the folder itself as the origin of the weights, not its `PART` subfolder.
    model.config._name_or_path = model.name_or_path = os.fspath(path)
    if missing := sorted(info.get("missing_keys") or ()):
        raise CheckpointError(
            f"{path} was pulled for other ranks or another layout ({PARTIAL}): {', '.join(missing[:5])} are stored in "
            f"{', '.join(sorted(omitted))}. Run `hf-megatron pull` for this layout."
        )

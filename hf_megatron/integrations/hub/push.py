"""Collective push of a folder to the Hub: several ranks upload, and one commit makes all files visible at once.

Uploads are content-addressed, so calling an interrupted push again sends only what the Hub lacks.
"""

import socket
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch.distributed import ProcessGroup

from ...checkpoint.manifest import MANIFEST
from ...core.communication.rank_errors import gather, gather_on_first, raise_on_all_ranks, rank_and_size
from ...errors import CheckpointError, ConfigError
from .push_selection import CARD, Selection, check_card_metadata, explained, select

UPLOADERS = ("first", "nodes", "all")
# Bytes that an uploader sends between two synchronizations, at least one file: waiting ranks are inside a collective,
# which has a time limit, and an error should stop the other ranks soon.
ROUND = 2 << 30


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    path_in_repo: str = "",
    ignore: Sequence[str] = (),
    group: ProcessGroup | None = None,
    uploaders: str = "first",
) -> CommitInfo:
    """Pushes a folder in one commit; a collective call of a job, or called by one process without torch.distributed.

    Files of an earlier push that would be read together with this one (shards of another number of ranks, weight files
    of another number of shards) are deleted in the same commit.

    Args:
        folder (`str` or `Path`): a sharded checkpoint or Hugging Face files, visible to the first rank and the
            uploaders.
        repo_id (`str`): `name` or `owner/name`; created if missing, `private` or not.
        revision (`str`, *optional*): branch, created if missing; `main` by default.
        create_pr (`bool`, defaults to `False`): open a pull request instead of committing to the branch.
        ignore (`Sequence[str]`): patterns of names that are not pushed, in addition to `push_selection.SKIPPED`.
        uploaders (`str`, defaults to `"first"`): ranks that send files: `"first"` the first rank, `"nodes"` one rank of
            each host, or `"all"` ranks. Each file is sent once.

    Returns:
        `CommitInfo`: the same on every rank.

    Raises:
        ConfigError: on every rank, for an invalid argument.
        CheckpointError: on every rank, for a file that cannot be pushed (see `push_selection.select`) or an error of
            the Hub; no commit was made.
    """
    _check_arguments(repo_id, uploaders, path_in_repo)
    push = _Push(Path(folder), repo_id, revision, create_pr, path_in_repo, HfApi(token=token), group)
    push.prepare(tuple(ignore), private)
    push.upload(uploaders)
    return push.commit(commit_message or f"Upload {push.folder.name}", commit_description)


def push_checkpoint(folder: str | Path, repo_id: str, **arguments: Any) -> CommitInfo:
    """Pushes a sharded checkpoint with the arguments of `push_folder`; a collective call, or called by one process.

    Raises:
        CheckpointError: on every rank; the folder holds no complete sharded checkpoint, or as in `push_folder`.
    """
    error = None
    if rank_and_size(arguments.get("group"))[0] == 0 and not (Path(folder) / MANIFEST).is_file():
        error = CheckpointError(
            f"{folder} has no {MANIFEST}, so it is not a sharded checkpoint. Use push_folder for Hugging Face files."
        )
    raise_on_all_ranks(error, arguments.get("group"), f"Pushing {folder}")
    return push_folder(folder, repo_id, **arguments)


def _check_arguments(repo_id: str, uploaders: str, path_in_repo: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"repo_id = {repo_id!r}: {error}") from error
    if uploaders not in UPLOADERS:
        raise ConfigError(f"uploaders = {uploaders!r}: expected one of {', '.join(map(repr, UPLOADERS))}.")
    if path_in_repo.startswith("/") or ".." in path_in_repo.split("/"):
        raise ConfigError(f"path_in_repo = {path_in_repo!r}: expected a folder inside the repository.")


class _Push:
    """State of one push; every method is collective and raises on all ranks."""

    def __init__(
        self,
        folder: Path,
        repo_id: str,
        revision: str | None,
        create_pr: bool,
        path_in_repo: str,
        api: HfApi,
        group: ProcessGroup | None,
    ):
        self.folder, self.repo_id, self.api, self.group = folder, repo_id, api, group
        self.revision, self.create_pr = revision, create_pr
        self.prefix = f"{path_in_repo.rstrip('/')}/" if path_in_repo.rstrip("/") else ""
        self.rank, self.size = rank_and_size(group)
        self.doing = f"Pushing {folder} to {repo_id}"
        self.selection = Selection({}, {}, (), False)
        self.operations: list[CommitOperationAdd] = []

    def _together(self, action: Callable[[], Any] | None) -> Any:
        """Returns the result of `action` on this rank; an error on any rank is raised on all of them."""
        result, error = None, None
        try:
            if action is not None:
                result = action()
        except CheckpointError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - the client raises many kinds, and all ranks have to hear of them
            error = CheckpointError(explained(caught))
            error.__cause__ = caught
        raise_on_all_ranks(error, self.group, self.doing)
        return result

    def _on_first(self, action: Callable[[], Any]) -> Any:
        return gather(self._together(action if self.rank == 0 else None), self.group, self.doing)[0]

    def prepare(self, ignore: tuple[str, ...], private: bool | None) -> None:
        """Selects the files and creates the repository and the branch."""
        targets = gather((str(self.folder), self.repo_id, self.revision), self.group, self.doing)
        if len(set(targets)) > 1:
            listing = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(targets))
            raise CheckpointError(f"The ranks disagree on what to push: {listing}.")

        def begin() -> tuple[Selection, str]:
            selection = select(self.folder, ignore)
            if CARD in selection.sizes and not self.prefix:
                check_card_metadata(self.folder / CARD)
            repo_id = self.api.create_repo(self.repo_id, private=private, exist_ok=True).repo_id
            if self.revision not in (None, "main") and not str(self.revision).startswith("refs/"):
                self.api.create_branch(repo_id, branch=str(self.revision), exist_ok=True)
            if selection.skipped:
                warnings.warn(f"{self.folder}: not pushed: {', '.join(selection.skipped)}.", stacklevel=2)
            return selection, repo_id

        self.selection, self.repo_id = self._on_first(begin)

    def _uploading_ranks(self, uploaders: str) -> list[int]:
        if uploaders == "first":
            return [0]
        hosts = gather(socket.gethostname(), self.group, self.doing)
        return list(range(self.size)) if uploaders == "all" else sorted({hosts.index(host) for host in hosts})

    def _shares(self, ranks: list[int]) -> list[list[str]]:
        """Assigns the files to these ranks, largest first, each to the rank with the fewest bytes so far."""
        shares: list[list[str]] = [[] for _ in ranks]
        assigned_bytes = [0] * len(ranks)
        seen: set[str] = set()
        for name, size in sorted(self.selection.sizes.items(), key=lambda item: (-item[1], item[0])):
            digest = self.selection.digests.get(name)
            if digest in seen:
                # Send identical content under several names once; the commit finds it on the Hub.
                continue
            if digest is not None:
                seen.add(digest)
            least = assigned_bytes.index(min(assigned_bytes))
            shares[least].append(name)
            assigned_bytes[least] += size
        return shares

    def upload(self, uploaders: str) -> None:
        """Uploads the files that the Hub lacks; they become visible with the commit."""
        ranks = self._uploading_ranks(uploaders)
        rounds = [_in_rounds(share, self.selection.sizes) for share in self._shares(ranks)]
        for names_of in zip_longest(*rounds, fillvalue=[]):
            names = names_of[ranks.index(self.rank)] if self.rank in ranks else []
            self._together(partial(self._send, names) if names else None)

    def _operation(self, name: str) -> CommitOperationAdd:
        path = self.folder / name
        local_size = path.stat().st_size
        if local_size != self.selection.sizes[name]:
            raise CheckpointError(
                f"{path} has {local_size} bytes on this rank and {self.selection.sizes[name]} on rank 0. All uploading "
                "ranks must see the same folder."
            )
        return CommitOperationAdd(self.prefix + name, path)

    def _send(self, names: list[str]) -> None:
        operations = [self._operation(name) for name in names]
        self.api.preupload_lfs_files(self.repo_id, operations, revision=self.revision, create_pr=self.create_pr or None)
        self.operations += operations

    def commit(self, message: str, description: str | None) -> CommitInfo:
        """Commits all files. The gathered operations carry their hashes, so the first rank does not hash again."""
        parts = gather_on_first(self.operations, self.group, self.doing)

        def finish() -> tuple[Any, ...]:
            operations: list[Any] = [operation for part in parts for operation in part]
            known = {operation.path_in_repo for operation in operations}
            operations += [self._operation(name) for name in self.selection.sizes if self.prefix + name not in known]
            present = self.api.list_repo_files(self.repo_id, revision=self.revision)
            inside = (name.removeprefix(self.prefix) for name in present if name.startswith(self.prefix))
            operations += [CommitOperationDelete(self.prefix + name) for name in self.selection.stale(inside)]
            info = self.api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                commit_description=description,
                revision=self.revision,
                create_pr=self.create_pr,
            )
            return info.commit_url, info.commit_message, info.commit_description, info.oid, info.pr_url

        url, text, details, oid, pr_url = self._on_first(finish)
        return CommitInfo(commit_url=url, commit_message=text, commit_description=details, oid=oid, pr_url=pr_url)


def _in_rounds(names: list[str], sizes: Any) -> list[list[str]]:
    rounds: list[list[str]] = []
    room = 0
    for name in names:
        if not rounds or sizes[name] > room:
            rounds.append([])
            room = ROUND
        rounds[-1].append(name)
        room -= sizes[name]
    return rounds

"""Pull from the Hub of the files that some ranks of a layout need, with a check of every file; resumable.

The manifest, or the index of Hugging Face files, is put in place last: a folder without it is not a checkpoint. Files
that were left out on purpose are listed in `partial.json`, so that readers can report them by name.
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from huggingface_hub import HfApi, RepoFile, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from ...checkpoint.manifest import MANIFEST, Manifest
from ...checkpoint.meta_model import load_meta_model
from ...checkpoint.reader import PARTIAL
from ...checkpoint.rng_state import file_name as random_file
from ...config import MegatronConfig
from ...core.axes import Axes
from ...core.io.checksums import FileDigest, hash_file
from ...core.io.safe_paths import is_plain_name
from ...errors import CheckpointError, ConfigError, MegatronError
from .pulled_folder import WAITING, Pulled, compute_sha256, link_part, put_in_place, record_omitted
from .push_selection import INDEX, REFUSED, explained, weight_map
from .required_files import Stage, files_for, merged_files_for, stage_of

# As `snapshot_download`.
_CONCURRENT_DOWNLOADS = 8
_OF_RANKS = ("random-", "data-")


def pull_checkpoint(
    repo_id: str,
    target: str | Path,
    *,
    config: MegatronConfig | None = None,
    rank: int | Sequence[int] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    optimizer: bool = True,
) -> Pulled:
    """Fetches a checkpoint, or the files of it that some ranks need; call it in one process per folder.

    A second call for other ranks of the same commit adds their files. Pickles are never fetched.

    Args:
        repo_id (`str`): repository with a sharded checkpoint or Hugging Face files.
        target (`str` or `Path`): folder that is filled.
        config (`MegatronConfig`, *optional*): layout of the job that will read the checkpoint; `dp_size` defaults to 1.
        rank (`int` or `Sequence[int]`, *optional*): ranks of that layout, such as all ranks of this host; all ranks by
            default.
        revision (`str`, *optional*): branch, tag or commit.
        optimizer (`bool`, defaults to `True`): whether to fetch the optimizer state.

    Returns:
        `Pulled`: the files that were fetched and left out.

    Raises:
        ConfigError: a rank without a layout, or a rank outside the layout.
        CheckpointError: a file that differs from the manifest, another checkpoint in the folder, or an error of the
            Hub.
    """
    ranks = _build_axes(config, rank)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"repo_id = {repo_id!r}: {error}") from error
    try:
        return _Pull(repo_id, Path(os.path.abspath(target)), revision, token).run(config, ranks, optimizer)
    except MegatronError:
        raise
    except Exception as error:  # noqa: BLE001 - the client raises many kinds, including errors of its HTTP library
        raise CheckpointError(f"Pulling {repo_id} to {target} failed: {explained(error)}") from error


def _build_axes(config: MegatronConfig | None, rank: int | Sequence[int] | None) -> dict[int, Axes]:
    if rank is None:
        return {}
    if config is None:
        raise ConfigError(f"rank = {rank!r} needs a layout. Pass config=MegatronConfig(...) as well.")
    ranks = [rank] if isinstance(rank, int) else list(rank)
    if not ranks:
        raise ConfigError("rank = []: expected at least one rank, or None for all.")
    return {number: Axes.of(config, number) for number in ranks}


class _Pull:
    """State of one pull: lists, selects, fetches and checks files, and puts the manifest in place."""

    def __init__(self, repo_id: str, target: Path, revision: str | None, token: str | bool | None):
        self.repo_id, self.target, self.token = repo_id, target, token
        api = HfApi(token=token)
        # Pin the commit, because others may push meanwhile.
        self.commit = str(api.model_info(repo_id, revision=revision).sha)
        listed = api.list_repo_tree(repo_id, recursive=True, revision=self.commit)
        self.remote = {entry.path: entry for entry in listed if isinstance(entry, RepoFile)}
        for name in self.remote:
            if not is_plain_name(name):
                raise CheckpointError(
                    f"{repo_id} has a file {name!r} with a path outside the folder; nothing is pulled."
                )
        self.fetched, self._lock = 0, Lock()

    def run(self, config: MegatronConfig | None, ranks: Mapping[int, Axes], optimizer: bool) -> Pulled:
        self.config, self.ranks = config, ranks
        last = MANIFEST if MANIFEST in self.remote else INDEX if INDEX in self.remote else None
        manifest = None
        if last is not None:
            waiting = self._fetch(last, self.target / WAITING)
            self._same_checkpoint(waiting)
            if last == MANIFEST:
                manifest = Manifest.load(self.target / WAITING)
        names = self._wanted(manifest)
        small = {name for name in names if not name.endswith(".safetensors")} - {last}
        digests: Mapping[str, FileDigest] = {} if manifest is None else manifest.files
        self._fetch_all(small, digests)
        needed = self._needed(manifest, names, optimizer) | small
        # Keep files that an earlier pull fetched for other ranks.
        here = {name for name in names - needed if (self.target / name).is_file()}
        self._fetch_all((needed | here) - small - {last}, digests)
        return self._finish(last, names, needed | here)

    def _wanted(self, manifest: Manifest | None) -> set[str]:
        """Returns all files that a pull without a rank fetches."""
        safe = {
            name
            for name in self.remote
            if not name.lower().endswith(REFUSED) and not any(part.startswith(".") for part in name.split("/"))
        }
        if manifest is None:
            return safe - {PARTIAL}
        if missing := sorted(manifest.files.keys() - self.remote.keys()):
            raise CheckpointError(
                f"{self.repo_id} at {self.commit} lacks files that its {MANIFEST} lists: {', '.join(missing)}."
            )
        if unsafe := sorted(name for name in manifest.files.keys() - safe):
            raise CheckpointError(
                f"{self.repo_id}: its {MANIFEST} lists {', '.join(unsafe)}. Hidden files, and formats that can contain "
                "a pickle, are not pulled."
            )
        # Other text files, such as the card, are included; weights outside the manifest are not part of the checkpoint.
        text = {name for name in safe if not name.endswith(".safetensors") and "/" not in name} - {INDEX, PARTIAL}
        return {*manifest.files, *text, MANIFEST}

    def _same_checkpoint(self, waiting: Path) -> None:
        present = self.target / waiting.name
        if present.is_file() and present.read_bytes() != waiting.read_bytes():
            shutil.rmtree(self.target / WAITING)
            raise CheckpointError(
                f"{self.target} holds a different checkpoint than {self.repo_id} at {self.commit}, and existing "
                "checkpoints are never overwritten. Pull into another folder."
            )

    def _needed(self, manifest: Manifest | None, names: set[str], optimizer: bool) -> set[str]:
        if self.config is None or not self.ranks or (manifest is None and INDEX not in self.remote):
            # A pull without ranks needs all files.
            return set(names)
        if manifest is None:
            index = weight_map(self.target / WAITING / INDEX)
            if unknown := ", ".join(sorted(set(index.values()) - self.remote.keys())):
                raise CheckpointError(f"{self.repo_id}: {INDEX} names {unknown}, which the repository does not have.")
        needed: set[str] = set()
        stages: dict[int, Stage] = {}
        for axes in self.ranks.values():
            pp_rank = axes.rank("pp")
            if pp_rank not in stages:
                stages[pp_rank] = stage_of(load_meta_model(self.target), self.config, axes)
            stage = stages[pp_rank].of_rank(axes)
            if manifest is not None:
                needed |= files_for(manifest, stage, optimizer=optimizer)
            else:
                needed |= merged_files_for(index, stage)
        return needed if manifest is None else needed | _without_layout(manifest, names, self.ranks)

    def _fetch_all(self, names: Set[str | None], digests: Mapping[str, FileDigest]) -> None:
        """Fetches and checks files, several at a time."""
        # Not `snapshot_download`: when the Hub does not answer, it returns the folder as it is, with a warning.
        with ThreadPoolExecutor(max_workers=_CONCURRENT_DOWNLOADS) as threads:
            for _ in threads.map(lambda name: self._checked(name, digests.get(name)), sorted(filter(None, names))):
                pass

    def _fetch(self, name: str, folder: Path) -> Path:
        try:
            path = hf_hub_download(
                self.repo_id, name, revision=self.commit, local_dir=folder, token=self.token, library_name="hf_megatron"
            )
        except EntryNotFoundError as error:
            raise CheckpointError(f"{self.repo_id} at {self.commit} has no {name}.") from error
        with self._lock:
            self.fetched += os.path.getsize(path)
        return Path(path)

    def _checked(self, name: str, entry: FileDigest | None) -> None:
        """Fetches a file unless it is present, and compares it with the manifest or with the Hub's own hash."""
        path = self.target / name
        if path.is_file() and self._difference(path, name, entry) is None and (entry or self.remote[name].lfs):
            return
        path.unlink(missing_ok=True)
        self._fetch(name, self.target)
        if (problem := self._difference(path, name, entry)) is not None:
            # Delete it, so that a later call fetches it again.
            path.unlink()
            raise CheckpointError(f"{path}: the file received from {self.repo_id} is corrupt: {problem}. Pull again.")

    def _difference(self, path: Path, name: str, entry: FileDigest | None) -> str | None:
        if entry is not None:
            digest = hash_file(path)
            problem = (
                f"{digest.size} bytes with blake3 {digest.blake3[:12]} instead of {entry.size} with {entry.blake3[:12]}"
            )
            return None if digest == entry else problem
        lfs = self.remote[name].lfs
        size = path.stat().st_size
        if size != self.remote[name].size:
            return f"{size} bytes instead of {self.remote[name].size}"
        if lfs is not None and compute_sha256(path) != lfs.sha256:
            return f"its sha256 is not {lfs.sha256[:12]}"
        return None

    def _finish(self, last: str | None, names: set[str], files: set[str]) -> Pulled:
        files = files | ({last} if last is not None else set())
        omitted = sorted(names - files)
        if omitted:
            assert self.config is not None
            layout = {"layout": self.config.to_dict(), "ranks": sorted(self.ranks)}
            record_omitted(self.target, {"repo_id": self.repo_id, "commit": self.commit, "absent": omitted, **layout})
        else:
            (self.target / PARTIAL).unlink(missing_ok=True)
        if last == INDEX:
            link_part(self.target, files if omitted else set())
        if last is not None:
            put_in_place(self.target, last)
        sizes = {name: self.remote[name].size for name in names}
        present = sum(sizes[name] for name in files)
        listed = tuple(sorted(files)), tuple(omitted)
        return Pulled(self.target, self.commit, *listed, present, sum(sizes.values()), self.fetched)


def _without_layout(manifest: Manifest, names: set[str], ranks: Iterable[int]) -> set[str]:
    """Returns the files without tensor shards, except random and data states of other ranks."""
    stored = {piece.file for entry in manifest.tensors.values() for piece in entry.pieces}
    # Random and data states have one file per rank; a run on another layout starts from rank 0's.
    state_files = {random_file(number) for number in (0, *ranks)}
    state_files |= {name.replace("random-", "data-") for name in state_files}
    return {name for name in names - stored if not name.startswith(_OF_RANKS) or name in state_files}

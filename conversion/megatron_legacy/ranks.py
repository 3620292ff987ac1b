"""Rank folders of Megatron's legacy `torch` format, and the metadata of their files."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.io.random_access_file import DataFile
from ...core.io.safetensors import check_count
from ...errors import CheckpointError
from ..megatron.arguments import stored_arguments
from ..megatron.folder import iteration_folder
from ..megatron.names import LANGUAGE
from ..torch_files.torch_save import Saved, StoredTensor
from ..torch_files.weight_file import open_saved
from .pre_core import check_version, core_arguments, core_names, flattened, is_older

FILE = "model_optim_rng.pt"
_KINDS = ("tensor", "pipeline", "expert")
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


class Rank(NamedTuple):
    """Tensor-, pipeline- and expert-parallel rank."""

    tp: int
    pp: int
    ep: int


def all_ranks(sizes: Rank) -> Iterator[Rank]:
    """Yields every rank; lazily, because a damaged file may report more ranks than fit into memory."""
    return (Rank(tp, pp, ep) for tp in range(sizes.tp) for pp in range(sizes.pp) for ep in range(sizes.ep))


def rank_folder(rank: Rank, sizes: Rank) -> str:
    """Returns the name of a rank's folder (Megatron-LM's training/checkpointing.py, `get_checkpoint_name`)."""
    pipeline = f"_{rank.pp:03d}" if sizes.pp > 1 else ""
    expert = f"_{rank.ep:03d}" if sizes.ep > 1 else ""
    return f"mp_rank_{rank.tp:02d}{pipeline}{expert}"


@dataclass(frozen=True)
class RankFile:
    """A rank's file, whose tensors are read on demand.

    Attributes:
        blob: reads tensors.
        chunks: the tensors of each of the rank's virtual pipeline stages, or of its only stage.
        arguments: Megatron-LM's arguments, as far as the file has any.
        version: `checkpoint_version`, which determines the order of query, key and value rows.
        iteration: 0 in a release.
        optimizer: whether there is optimizer state, in this file or in a separate one.
    """

    path: Path
    blob: Saved
    chunks: tuple[Mapping[str, StoredTensor], ...]
    arguments: Mapping[str, Any]
    version: float
    iteration: int
    optimizer: bool

    @classmethod
    def open(cls, path: Path, block: str, files: ExitStack) -> "RankFile":
        """Opens a file and parses its metadata; `files` closes it.

        Args:
            block: Megatron-Core's name of the module with the layers.

        Raises:
            CheckpointError: naming the file, if it is damaged, unsafe to read or of an unknown version.
        """
        blob = open_saved(files.enter_context(DataFile(path)))
        content = blob.value
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is rejected: it does not contain a dict.")
        arguments: Mapping[Any, Any] = stored_arguments(content, path)
        # Megatron-LM treats a file without a version as version 0.
        version, iteration = content.get("checkpoint_version", 0), content.get("iteration", 0)
        if type(version) not in (int, float) or type(iteration) is not int:
            raise CheckpointError(f"{path} is rejected: checkpoint_version or iteration has an invalid type.")
        numbered = takewhile(content.__contains__, (f"model{number}" for number in count()))
        models = [flattened(path, content[key]) for key in (["model"] if "model" in content else numbered)]
        if not models:
            raise CheckpointError(f"{path} is rejected: it has no weights (model, or model0, model1, ...).")
        check_count(path, sum(map(len, models)))
        older = any(map(is_older, models))
        check_version(path, version, older)
        if older:
            models = [core_names(path, model, block) for model in models]
            arguments = core_arguments(arguments)
        chunks = tuple({key: _checked(blob, path, key, value) for key, value in _weights(model)} for model in models)
        has_optimizer_file = (path.parent / "distrib_optim.pt").exists()
        return cls(path, blob, chunks, arguments, version, iteration, has_optimizer_file or "optimizer" in content)


def _weights(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the weights of a model's table, without fp8 states and old rotary buffers."""
    for key, value in model.items():
        if "_extra_state" not in key.rpartition(".")[2] and key != "rotary_pos_emb.inv_freq":
            yield key, value


def _checked(blob: Saved, path: Path, key: str, value: Any) -> StoredTensor:
    """Checks that all bytes of a tensor are in the file, so that it is safe to allocate memory for it."""
    if not isinstance(value, StoredTensor) or not value.shape:
        raise CheckpointError(f"{path} is rejected: {key} is not a tensor.")
    if math.prod(value.shape) * value.dtype.itemsize > value.storage_nbytes:
        raise CheckpointError(f"{path} is rejected: {key} is an expanded view of a smaller storage.")
    # An empty read checks that the record exists.
    dims = len(value.shape)
    blob.read_into(value, [0] * dims, torch.empty((0,) * dims, dtype=value.dtype))
    return value


@dataclass(frozen=True)
class Ranks:
    """All files of a checkpoint.

    Attributes:
        folder: parent of the rank folders.
        sizes: number of ranks of each kind; experts are split over `expert_tp` tensor-parallel ranks.
    """

    folder: Path
    files: Mapping[Rank, RankFile]
    sizes: Rank
    expert_tp: int
    _open: ExitStack

    @property
    def first(self) -> RankFile:
        return self.files[min(self.files)]

    @classmethod
    def open(cls, path: str | Path, block: str) -> "Ranks":
        """Opens every rank's file, in the folder of `latest_checkpointed_iteration.txt` or of `mp_rank_*`.

        Args:
            block: Megatron-Core's name of the module with the layers.

        Raises:
            CheckpointError: naming a folder that is missing or surplus, or a file that is rejected.
        """
        folder = iteration_folder(Path(path))
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder.")
        folders = {
            tuple(int(number) for number in match.groups() if number is not None): entry
            for entry in sorted(folder.iterdir())
            if (match := _FOLDER.fullmatch(entry.name))
        }
        lengths = {len(indices) for indices in folders}
        if len(lengths) != 1:
            raise CheckpointError(
                f"{folder}: expected mp_rank_* folders of one kind, found {[p.name for p in folders.values()]}."
            )
        for entry in folders.values():
            if not (entry / FILE).is_file():
                raise CheckpointError(f"{entry / FILE} is missing.")
        with ExitStack() as stack:
            opened = {indices: RankFile.open(entry / FILE, block, stack) for indices, entry in folders.items()}
            return cls._of(folder, opened, stack)

    @classmethod
    def _of(cls, folder: Path, opened: Mapping[tuple[int, ...], RankFile], stack: ExitStack) -> "Ranks":
        """Checks that all ranks are present; on success, the files stay open."""
        only_experts = len(min(opened)) == 2 and _second_is_expert(opened)
        files = {_rank(indices, only_experts): file for indices, file in opened.items()}
        arguments, version = files[min(files)].arguments, files[min(files)].version
        if other := next((file for file in files.values() if file.version != version), None):
            raise CheckpointError(
                f"{other.path}: checkpoint_version is {other.version}, but another rank has {version}."
            )
        counts = [max(indices) + 1 for indices in zip(*files, strict=True)]
        sizes = Rank(*(_size(folder, arguments, *each) for each in zip(_KINDS, counts, strict=True)))
        expert_tp = arguments.get("expert_tensor_parallel_size") or sizes.tp
        if expert_tp not in (1, sizes.tp):
            raise CheckpointError(f"{folder}: expert_tensor_parallel_size {expert_tp} is neither 1 nor {sizes.tp}.")
        _check_complete(folder, files, sizes, expert_tp)
        return cls(folder, files, sizes, expert_tp, stack.pop_all())

    def close(self) -> None:
        self._open.close()


def _second_is_expert(files: Mapping[tuple[int, ...], RankFile]) -> bool:
    """Returns whether folders with two indices are expert ranks; pipeline ranks have the same pattern."""
    arguments = files[min(files)].arguments
    if arguments.get("pipeline_model_parallel_size") not in (None, 1):
        return False
    if arguments.get("expert_model_parallel_size") not in (None, 1):
        return True
    embedding = "embedding.word_embeddings.weight"
    return all(not {embedding, LANGUAGE + embedding}.isdisjoint(file.chunks[0]) for file in files.values())


def _rank(indices: tuple[int, ...], only_experts: bool) -> Rank:
    if only_experts:
        return Rank(indices[0], 0, indices[1])
    return Rank(*indices, *(0,) * (3 - len(indices)))


def _size(folder: Path, arguments: Mapping[str, Any], kind: str, num_ranks: int) -> int:
    name = f"{kind}_model_parallel_size"
    size = arguments.get(name) or num_ranks
    if type(size) is not int or size < num_ranks:
        raise CheckpointError(f"{folder} has folders of {num_ranks} ranks, but args has {name} {size}.")
    return size


def _check_complete(folder: Path, files: Mapping[Rank, RankFile], sizes: Rank, expert_tp: int) -> None:
    """Checks that every rank's folder is present.

    If experts are not split over tensor-parallel ranks, a tensor-parallel rank has only some of the expert ranks.
    """
    for rank in all_ranks(sizes):
        if rank in files:
            continue
        stage = [other for other in files if other.pp == rank.pp]
        there = rank.tp in {other.tp for other in stage} and rank.ep in {other.ep for other in stage}
        if expert_tp == sizes.tp or not there:
            raise CheckpointError(f"{folder / rank_folder(rank, sizes)} is missing.")

"""Checks that stock loading lacks: mismatched weights, index files with outside paths, mapped storages."""

import contextlib
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..core.io.untrusted_json import read_weight_map
from ..errors import CheckpointError


def check_weight_index(path: str | os.PathLike[str]) -> None:
    """Raises `CheckpointError` for an index file with shards outside of its directory."""
    if not os.path.isdir(path):
        return
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        index = os.path.join(path, name)
        if not os.path.isfile(index):
            continue
        root = os.path.realpath(path)
        for shard in sorted(set(read_weight_map(Path(index)).values())):
            inside = os.path.commonpath([root, os.path.abspath(os.path.join(root, shard))]) == root
            if os.path.isabs(shard) or not inside:
                raise CheckpointError(f"{index} references {shard!r}, which is outside the checkpoint folder.")


def check_loaded(model: Any, info: dict[str, Any], *, strict: bool, ignore_mismatched: bool = False) -> None:
    """Raises `CheckpointError` for missing, surplus or mis-shaped weights, with the option that disables the check.

    The head that a class adds to the base model, such as for classification, may be missing completely, together with
    a pooler: the checkpoint then belongs to another class, whose heads may be surplus. Heads may also be surplus for a
    base model. A language model's head must be present. A pooler that the class does not have, and heads in addition
    to the class's own (BERT's `cls.seq_relationship`), may be surplus.
    """
    problems, advice = [], []
    mismatched = () if ignore_mismatched else info.get("mismatched_keys") or ()
    if mismatched:
        listing = [
            f"{name}: file {tuple(file_shape)}, model {tuple(model_shape)}"
            for name, file_shape, model_shape in sorted(mismatched)[:5]
        ]
        problems.append(f"{len(mismatched)} mis-shaped ({'; '.join(listing)})")
        advice.append(" Pass ignore_mismatched_sizes=True to initialize the mis-shaped ones.")
    missing, surplus = set(info.get("missing_keys") or ()), set(info.get("unexpected_keys") or ())
    heads = _heads(model)
    if heads is not None and missing in (heads, heads | _pooler(model)):
        missing, surplus = set(), {name for name in surplus if _is_base_weight(model, name)}
    elif model.base_model is model:
        surplus = {name for name in surplus if _is_base_weight(model, name)}
    surplus = {name for name in surplus if not _belongs_to_other_head(model, name)}
    for kind, keys in (("missing", missing), ("unexpected", surplus)):
        names = sorted(keys)
        if names and strict:
            problems.append(f"{len(names)} {kind} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})")
            advice.append(
                " To initialize missing weights or ignore unexpected ones, load with "
                "MegatronConfig(strict_loading=False)."
            )
    if info.get("error_msgs"):
        problems.append(str(info["error_msgs"]))
    if problems:
        raise CheckpointError(
            f"The weights do not match {type(model).__name__}: {'; '.join(problems)}.{''.join(dict.fromkeys(advice))}"
        )


def _heads(model: Any) -> set[str] | None:
    """Returns the names of the parameters outside the base model; `None` for base models and language models."""
    if model.get_output_embeddings() is not None or model.base_model is model:
        return None
    return {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}


def _pooler(model: Any) -> set[str]:
    """Returns the names of pooler parameters, which base models create for some classes only."""
    prefix = f"{model.base_model_prefix}.pooler."
    return {name for name, _ in model.named_parameters() if name.startswith(prefix)}


def _belongs_to_other_head(model: Any, name: str) -> bool:
    """Returns whether a weight belongs to a module that the class does not have: a pooler, or an additional head."""
    first, _, rest = name.partition(".")
    owner = model._modules.get(first)
    second = rest.partition(".")[0]
    if not isinstance(owner, torch.nn.Module) or second == rest or second in owner._modules:
        return False
    return second == "pooler" if first == model.base_model_prefix else owner is not model.base_model


def _is_base_weight(model: Any, name: str) -> bool:
    first = name.partition(".")[0]
    return first == model.base_model_prefix or first in model.base_model._modules


def own_memory(shard: torch.Tensor) -> torch.Tensor:
    """Copies a shard of any shape out of a mapped weight file (storage without an allocator).

    One copy is faster than the page faults of a private mapping when training writes to every weight; the file may be
    overwritten by the next save; and the copied shard starts at the beginning of its storage (up to torch 2.12,
    `copy.deepcopy` fails on a DTensor around a view with an offset).
    """
    if shard.device.type != "cpu" or shard.untyped_storage().resizable():
        return shard
    return empty_in_huge_pages(shard.shape, shard.dtype).copy_(shard)


def empty_in_huge_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized CPU tensor of any shape in 2 MiB pages, if available, which fill four times as fast."""
    size = shape.numel() * dtype.itemsize
    if sys.platform != "linux" or size < 2**21:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages returns EINVAL; small pages work as well.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

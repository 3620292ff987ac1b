"""Reader of indices in Megatron-LM's own cache, used if they describe the same samples.

`GPTDataset` stores a description with its three arrays, and `BlendedDataset` with its two. The description states
neither whether samples have an extra token nor the sizes of the files, so the arrays are also compared with indices
computed from their first documents.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .sample_index import SPLITS, BlendOrder, blend_order, compute_sample_starts, count_samples

_DESCRIPTION = "-description.txt"
# Megatron's file -> the array's name here.
_ARRAYS = {"document_index": "documents", "sample_index": "starts", "shuffle_index": "shuffle"}
# Number of documents whose samples are compared.
_COMPARED = 4096
# Number of samples whose lengths are checked.
_LOOKED_AT = 256


def default_folder(prefix: str) -> Path:
    """Returns the folder that Megatron-LM uses without `--data-cache-path`."""
    return Path(prefix, "cache", "GPTDataset_indices")


def megatron_arrays(
    folder: Path,
    prefix: str,
    lengths: np.ndarray,
    bounds: tuple[int, int],
    tokens: int,
    epochs: int,
    share: tuple[float, float],
    request: Mapping[str, Any],
) -> Mapping[str, np.ndarray] | None:
    """Returns the arrays of a folder with the requested description and first samples; `None` if there are none.

    Args:
        prefix (`str`): of the pair.
        lengths: of all its sequences.
        bounds: `[first, stop)` sequences of the split.
        tokens (`int`): of the split.
        epochs (`int`): to read.
        share: of the split.
        request: requested sequence length, samples, seed, and sample format.
    """
    for path in sorted(folder.glob(f"*-GPTDataset-*{_DESCRIPTION}")) if folder.is_dir() else ():
        description = _described(path)
        if description is None or not _is_asked_for(description, prefix, share, request):
            continue
        base = str(path).removesuffix(_DESCRIPTION)
        try:
            arrays = {
                name: np.load(f"{base}-{file}.npy", mmap_mode="r", allow_pickle=False) for file, name in _ARRAYS.items()
            }
            written = min(os.stat(f"{base}-{file}.npy").st_mtime_ns for file in _ARRAYS)
        except (OSError, ValueError, EOFError):
            continue
        # The arrays must be newer than the dataset.
        if written > os.stat(f"{prefix}.idx").st_mtime_ns and _fit(
            arrays, lengths, bounds, epochs * tokens, epochs, request
        ):
            return arrays
    return None


def megatron_blend(
    folder: Path,
    datasets: Sequence[tuple[str, tuple[float, float], Mapping[str, Any]]],
    weights: Sequence[float],
    size: int | None,
) -> BlendOrder | None:
    """Returns the order of a blend with the requested description and first samples; `None` if there is none.

    Args:
        datasets: for each its prefix, the share of its split, and its requested values.
        weights: of the datasets, or their sizes if they are used up.
        size (`int`, *optional*): samples of the blend; without it all datasets are used up.
    """
    total = int(sum(weights)) if size is None else size
    shares = np.asarray(weights, dtype=np.float64)
    described = list(weights) if size is None else (shares / np.sum(shares)).tolist()
    for path in sorted(folder.glob(f"*-BlendedDataset-*{_DESCRIPTION}")) if folder.is_dir() else ():
        description = _described(path)
        if description is None or description.get("size") != size or description.get("weights") != described:
            continue
        parts = description.get("datasets")
        if not isinstance(parts, list) or len(parts) != len(datasets):
            continue
        if not all(_is_asked_for(part, *one) for part, one in zip(parts, datasets, strict=True)):
            continue
        base = str(path).removesuffix(_DESCRIPTION)
        try:
            dataset, sample = (
                np.load(f"{base}-{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in ("dataset_index", "dataset_sample_index")
            )
        except (OSError, ValueError, EOFError):
            continue
        if dataset.shape == sample.shape == (total,) and _begins_as(dataset, sample, weights, size):
            return BlendOrder(dataset, sample)
    return None


def _begins_as(dataset: np.ndarray, sample: np.ndarray, weights: Sequence[float], size: int | None) -> bool:
    """Returns whether the first samples follow the blending rule; without a size, up to where a dataset may run out."""
    compared = min(len(dataset), _COMPARED if size is not None else int(min(weights)))
    expected = blend_order([float(weight) for weight in weights], compared)
    return np.array_equal(dataset[:compared], expected.dataset) and np.array_equal(sample[:compared], expected.sample)


def _described(path: Path) -> dict[str, Any] | None:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return description if isinstance(description, dict) else None


def _is_asked_for(
    description: Mapping[str, Any], prefix: str, share: tuple[float, float], request: Mapping[str, Any]
) -> bool:
    part, shares = description.get("index_split"), description.get("split_matrix")
    if part not in SPLITS or not isinstance(shares, list) or len(shares) != len(SPLITS):
        return False
    return (
        # Compare names only: the folder may have been moved.
        os.path.basename(str(description.get("dataset_path"))) == os.path.basename(prefix)
        and description.get("num_samples") == request["samples"]
        and description.get("random_seed") == request["seed"]
        and description.get("sequence_length") == request["sequence_length"]
        and shares[SPLITS.index(part)] == list(share)
    )


def _fit(
    arrays: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    bounds: tuple[int, int],
    tokens: int,
    epochs: int,
    request: Mapping[str, Any],
) -> bool:
    documents, starts, shuffle = (arrays[name] for name in _ARRAYS.values())
    extra, length = int(request["extra_token"]), request["sequence_length"]
    count = count_samples(tokens, length, extra, drop_last_partial=request["drop_last_partial"])
    sizes = documents.shape, starts.shape, shuffle.shape
    if sizes != ((epochs * (bounds[1] - bounds[0]),), (count + 1, 2), (count,)):
        return False
    first = np.asarray(documents[:_COMPARED])
    if first.min() < bounds[0] or first.max() >= bounds[1]:
        return False
    if len(first) == len(documents):
        drop = request["drop_last_partial"]
        return bool(
            np.array_equal(compute_sample_starts(lengths, first, length, extra, tokens, drop_last_partial=drop), starts)
        )
    held = int(lengths[first].sum(dtype=np.int64))
    # The last entry marks the end of these documents, not the start of a sample: leave it out.
    if held > length:
        rows = compute_sample_starts(lengths, first, length, extra, held, drop_last_partial=True)[:-1]
        if not np.array_equal(rows, starts[: len(rows)]):
            return False
    return _are_as_long(documents, starts, lengths, length)


def _are_as_long(documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray, length: int) -> bool:
    """Returns whether samples spread over the full order have the requested length."""
    for row in np.linspace(0, len(starts) - 3, _LOOKED_AT).astype(np.int64).tolist():
        (first, offset), (last, stop) = starts[row].tolist(), starts[row + 1].tolist()
        between = int(lengths[documents[first:last]].sum(dtype=np.int64))
        if between - offset + stop != length:
            return False
    return True

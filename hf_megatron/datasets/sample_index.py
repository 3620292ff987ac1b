"""Order of samples in Megatron-Core's GPTDataset, splits, and blends, in pure numpy.

See `megatron/core/datasets/gpt_dataset.py`, `blended_megatron_dataset_config.py`, and `helpers.cpp`. One random state
shuffles first the documents and then the samples; every split starts it anew from the seed.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DataError
from .index_cache import MappedArrays

# If less than this share of the last epoch's samples is needed, that epoch is shuffled separately.
_SEPARATE = 0.80
# Maximum number of documents times epochs for which arrays are created.
_MAX_DOCUMENTS = 1 << 36
# Documents whose lengths are summed at a time.
_BLOCK = 1 << 24
SPLITS = ("train", "valid", "test")
# Surplus of samples with which each dataset of a blend is built.
_SURPLUS = 0.005


@dataclass(frozen=True)
class SampleOrder(MappedArrays):
    """The samples of some documents, in the arrays of Megatron's `GPTDataset`.

    Attributes:
        document_index: documents in reading order, each repeated for every epoch.
        sample_index: `[samples + 1, 2]`: position in `document_index`, and token in that document, at which a sample
            begins.
        shuffle_index: `[samples]`: row of `sample_index` for each sample of the shuffled order.
        sequence_length (`int`): tokens of a sample, without the extra token that is only a label.
        extra (`int`): 1 if samples have that token, else 0.
        epochs (`int`): number of times the documents are read.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray
    sequence_length: int
    extra: int
    epochs: int

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def pieces(self, sample: int) -> list[tuple[int, int, int]]:
        """Returns (document, first token, number of tokens) of each part of a sample; -1: to the document's end.

        Args:
            sample (`int`): index in the shuffled order.
        """
        row = int(self.shuffle_index[sample])
        (first, offset), (last, stop) = self.sample_index[row].tolist(), self.sample_index[row + 1].tolist()
        if first == last:
            return [(int(self.document_index[first]), offset, stop - offset + self.extra)]
        parts = [(int(self.document_index[first]), offset, -1)]
        parts += [(int(self.document_index[middle]), 0, -1) for middle in range(first + 1, last)]
        return [*parts, (int(self.document_index[last]), 0, stop + self.extra)]


def parse_split(split: str) -> tuple[tuple[float, float] | None, ...]:
    """Returns the share `[low, high)` of train, valid and test; `None` for an empty split.

    Args:
        split (`str`): weights such as `"969,30,1"`.

    Raises:
        DataError: no weight, or more than three.
    """
    if not isinstance(split, str):
        raise DataError(f"split = {split!r}: expected one to three weights, such as '969,30,1'.")
    texts = re.split(r"[,/\s]+", split.strip(" ,/"))
    # Megatron extracts anything that looks like a number; other text is an error here.
    weights = [float(text) for text in texts if re.fullmatch(r"\d+\.?\d*|\.\d+", text)]
    if len(weights) != len(texts) or not weights or len(weights) > len(SPLITS) or sum(weights) <= 0:
        raise DataError(f"split = {split!r}: expected one to three weights, such as '969,30,1'.")
    weights += [0.0] * (len(SPLITS) - len(weights))
    shares = [weight / sum(weights) for weight in weights]
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    return tuple((low, high) if low != high else None for low, high in zip(ends, ends[1:], strict=False))


def compute_split_bounds(share: tuple[float, float], sequences: int) -> tuple[int, int]:
    """Returns the `[first, stop)` sequences of a split; Python's rounding half to even is the same as Megatron's."""
    return int(round(share[0] * float(sequences))), int(round(share[1] * float(sequences)))


def list_split_documents(share: tuple[float, float], sequences: int) -> np.ndarray:
    """Returns the indices of a split's sequences."""
    return np.arange(*compute_split_bounds(share, sequences), dtype=np.int32)


def count_epochs(tokens: int, sequence_length: int, samples: int | None, extra: int) -> tuple[int, int | None]:
    """Returns the number of epochs needed, and the number of samples before the last epoch if that is shuffled apart.

    The last epoch is shuffled separately if few of its samples are needed; otherwise the second value is `None`.

    Args:
        tokens (`int`): tokens of an epoch.
        sequence_length (`int`): tokens of a sample.
        samples (`int`, *optional*): number of samples requested; one full epoch by default.
        extra (`int`): as in `SampleOrder`.
    """
    if samples is None:
        return 1, None
    epochs = max(1, -(-(samples * sequence_length + extra) // tokens))
    before = ((epochs - 1) * tokens - extra) // sequence_length
    separate = epochs > 1 and samples - before < int(_SEPARATE * ((tokens - extra) // sequence_length))
    return epochs, before if separate else None


def sample_order(
    lengths: np.ndarray,
    documents: np.ndarray,
    sequence_length: int,
    samples: int | None,
    seed: int,
    *,
    extra_token: bool = True,
    drop_last_partial: bool = True,
) -> SampleOrder:
    """Returns the order of samples of some documents, as in `GPTDataset`.

    Args:
        lengths: tokens of each document of the dataset; `GPTDataset` reads every sequence of a file as a document.
        documents: documents of the split, as indices into `lengths`.
        sequence_length (`int`): tokens of a sample.
        samples (`int`, *optional*): number of samples requested; one full epoch by default. More than one epoch changes
            the order of all samples.
        seed (`int`): seed of both shuffles.
        extra_token (`bool`, defaults to `True`): whether a sample has an extra token, the label of its last one.
        drop_last_partial (`bool`, defaults to `True`): whether an incomplete last sample is dropped.

    Raises:
        DataError: values out of range, or documents that make no sample.
    """
    if sequence_length < 1 or (samples is not None and samples < 1):
        raise DataError(f"sequence_length = {sequence_length}, samples = {samples}: expected 1 or more.")
    extra = int(extra_token)
    tokens = int(lengths[documents].sum(dtype=np.int64)) if len(documents) else 0
    if tokens == 0:
        raise DataError(f"{len(documents)} documents contain no tokens: no sample can be made.")
    epochs, before = count_epochs(tokens, sequence_length, samples, extra)
    if epochs * len(documents) > _MAX_DOCUMENTS:
        raise DataError(
            f"samples = {samples}: {epochs} epochs of {len(documents)} sequences exceed the supported size."
        )
    if (epochs * tokens - extra) // sequence_length < 1 and drop_last_partial:
        raise DataError(f"{tokens} tokens make no sample of {sequence_length}{' and one more' if extra else ''}.")
    stream = np.random.RandomState(seed)
    document_index = _shuffled_documents(documents, epochs, stream, separate=before is not None)
    sample_index = compute_sample_starts(
        lengths, document_index, sequence_length, extra, epochs * tokens, drop_last_partial=drop_last_partial
    )
    count = len(sample_index) - 1
    shuffle_index = _shuffled_samples(count if before is None else before, count, stream)
    return SampleOrder(document_index, sample_index, shuffle_index, sequence_length, extra, epochs)


def _shuffled_documents(
    documents: np.ndarray, epochs: int, stream: np.random.RandomState, *, separate: bool
) -> np.ndarray:
    parts = [epochs - 1, 1] if separate else [epochs]
    chunks = []
    for part in parts:
        chunk = np.tile(documents, part)
        stream.shuffle(chunk)
        chunks.append(chunk)
    return np.concatenate(chunks) if separate else chunks[0]


def _shuffled_samples(first: int, count: int, stream: np.random.RandomState) -> np.ndarray:
    dtype = np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64
    parts = [np.arange(first, dtype=dtype)]
    stream.shuffle(parts[0])
    if first < count:
        parts.append(np.arange(first, count, dtype=dtype))
        stream.shuffle(parts[1])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def count_samples(tokens: int, sequence_length: int, extra: int, *, drop_last_partial: bool) -> int:
    """Returns the number of samples that `tokens` tokens make."""
    if drop_last_partial:
        return (tokens - extra) // sequence_length
    # Megatron's C++ divides in float32.
    return math.ceil(np.float32(tokens - extra) / np.float32(sequence_length))


def compute_sample_starts(
    lengths: np.ndarray,
    document_index: np.ndarray,
    sequence_length: int,
    extra: int,
    tokens: int,
    *,
    drop_last_partial: bool,
) -> np.ndarray:
    """Returns `sample_index`, `[samples + 1, 2]`: position in `document_index`, and token in that document.

    Without the extra token, an entry may point past the last token of a document.
    """
    count = count_samples(tokens, sequence_length, extra, drop_last_partial=drop_last_partial)
    wide = max(len(document_index), int(lengths.max(initial=0))) > np.iinfo(np.int32).max
    starts = np.zeros((count + 1, 2), dtype=np.int64 if wide else np.int32)
    position = tokens_before = 0
    row = 1
    while row <= count:
        sizes = lengths[document_index[position : position + _BLOCK]].astype(np.int64)
        if not len(sizes):
            break
        ends = np.cumsum(sizes) + tokens_before
        # Last sample whose start is in this block of documents.
        last = min(count, int((ends[-1] - extra) // sequence_length))
        is_end = position + len(sizes) >= len(document_index)
        if is_end:
            last = count
        token_offsets = np.arange(row, last + 1, dtype=np.int64) * sequence_length
        if is_end and len(token_offsets):
            token_offsets[-1] = min(token_offsets[-1], ends[-1] - extra)
        number = np.searchsorted(ends, token_offsets - (1 - extra), side="right")
        starts[row : last + 1, 0] = number + position
        starts[row : last + 1, 1] = token_offsets - (ends[number] - sizes[number])
        row, position, tokens_before = last + 1, position + len(sizes), int(ends[-1])
    return starts


# Blends


@dataclass(frozen=True)
class BlendOrder(MappedArrays):
    """Order of a blend: dataset and sample at each position.

    Attributes:
        dataset: `[samples]`, int16: index of the dataset.
        sample: `[samples]`, int64: index in that dataset's own order.
    """

    dataset: np.ndarray
    sample: np.ndarray

    def __len__(self) -> int:
        return len(self.dataset)


def count_blend_samples(weights: Sequence[float], samples: int) -> tuple[list[int], list[int]]:
    """Returns the number of samples a blend takes from each dataset, and the slightly larger number to build it with.

    Args:
        weights: weights of the datasets; normalized here.
        samples (`int`): number of samples of the blend.
    """
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / np.sum(shares)
    taken = [math.ceil(samples * share) for share in shares.tolist()]
    return taken, [math.ceil(count * (1 + _SURPLUS)) for count in taken]


def blend_order(weights: Sequence[float], samples: int) -> BlendOrder:
    """Returns the order of a blend: each sample is from the dataset furthest below its weight; ties go to the first.

    Args:
        weights: weights of the datasets, as normalized by Megatron's `normalize`.
        samples (`int`): number of samples of the blend.
    """
    if len(weights) > np.iinfo(np.int16).max:
        raise DataError(f"BlendedDataset got {len(weights)} datasets: expected at most {np.iinfo(np.int16).max}.")
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / np.sum(shares)
    return _greedy(shares.tolist(), samples, [samples] * len(weights))


def exhaustive_order(sizes: Sequence[int]) -> BlendOrder:
    """Returns the order of a blend of all samples by the same rule; a dataset that is used up is left out."""
    shares = np.asarray(sizes, dtype=np.float64)
    shares = shares / np.sum(shares)
    return _greedy(shares.tolist(), int(sum(sizes)), list(sizes))


def _greedy(weights: list[float], samples: int, sizes: list[int]) -> BlendOrder:
    dataset, sample = np.zeros(samples, dtype=np.int16), np.zeros(samples, dtype=np.int64)
    counts = [0] * len(weights)
    remaining = list(range(len(weights)))
    for number in range(samples):
        # As in Megatron's C++, the first sample is drawn as if one had been drawn before.
        num_drawn = float(max(number, 1))
        best, largest = remaining[0], -math.inf
        for candidate in remaining:
            deficit = weights[candidate] * num_drawn - counts[candidate]
            if deficit > largest:
                best, largest = candidate, deficit
        dataset[number], sample[number] = best, counts[best]
        counts[best] += 1
        if counts[best] == sizes[best]:
            remaining = [candidate for candidate in remaining if candidate != best]
    return BlendOrder(dataset, sample)

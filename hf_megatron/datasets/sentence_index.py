"""Order of samples in BERT and T5 datasets: `build_mapping` of Megatron-Core's `helpers.cpp`.

Sample lengths use the 32-bit Mersenne Twister of a seed, the sample order the 64-bit one of the next seed.
"""

import math
from collections.abc import Iterator

import numpy as np

from ..errors import DataError

# Documents with several sentences are left out if one is longer than this.
_LONG_SENTENCE = 512
_DRAWN = 4096


def sentence_order(
    lengths: np.ndarray,
    ends: np.ndarray,
    target_length: int,
    samples: int | None,
    seed: int,
    *,
    short_probability: float,
    least_sentences: int,
) -> tuple[np.ndarray, int]:
    """Returns the shuffled samples `[samples, 3]`, and the number of epochs.

    A sample is its `[first, stop)` sentences, and its target number of tokens.

    Args:
        lengths: tokens of each sentence of the dataset.
        ends: `[documents + 1]`: first sentence of each document, and the end of the last document.
        target_length (`int`): number of tokens after which a sample ends, at a sentence boundary.
        samples (`int`, *optional*): epochs are added until there are enough; by default one epoch.
        seed (`int`): above 0.
        short_probability (`float`): share of shorter samples.
        least_sentences (`int`): minimum sentences of a sample; 1 or 2.

    Raises:
        DataError: no document makes a sample.
    """
    drawn = _draw_target_lengths(target_length, short_probability, seed)
    sizes, epochs = lengths[int(ends[0]) : int(ends[-1])].tolist(), 0
    spans: list[tuple[int, int, int]] = []
    borders = (ends - ends[0]).tolist()
    while epochs == 0 or (samples is not None and len(spans) < samples):
        before = len(spans)
        for first, stop in zip(borders, borders[1:], strict=False):
            spans += _split_document(sizes, first, stop, least_sentences, drawn)
        if len(spans) == before:
            raise DataError(
                f"{len(borders) - 1} documents make no sample of {least_sentences} sentences or more. Documents with "
                f"several sentences, one of them longer than {_LONG_SENTENCE} tokens, are left out."
            )
        epochs += 1
    order = np.asarray(spans, dtype=np.int64)
    order[:, :2] += int(ends[0])
    dtype = np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    return order[_shuffled(len(order), seed + 1)].astype(dtype), epochs


def _split_document(
    sizes: list[int], first: int, stop: int, least: int, drawn: Iterator[int]
) -> list[tuple[int, int, int]]:
    left = stop - first
    if left < least or (left > 1 and max(sizes[first:stop]) > _LONG_SENTENCE):
        return []
    spans, target, tokens, sentences = [], next(drawn), 0, 0
    begin = first
    for sentence in range(first, stop):
        tokens, sentences, left = tokens + sizes[sentence], sentences + 1, left - 1
        # Do not leave a single sentence for the next sample.
        if left == 0 or (tokens >= target and left > 1 and sentences >= least):
            spans.append((begin, sentence + 1, target))
            begin, target, tokens, sentences = sentence + 1, next(drawn), 0, 0
    return spans


def _draw_target_lengths(target: int, short_probability: float, seed: int) -> Iterator[int]:
    # Rounds half up, as in C.
    ratio = math.floor(1.0 / short_probability + 0.5) if short_probability > 0 else 0
    if ratio == 0:
        while True:
            yield target
    stream = np.random.RandomState(seed)
    while True:
        # Raw 32-bit outputs of the generator.
        for word in np.frombuffer(stream.bytes(4 * _DRAWN), dtype="<u4").tolist():
            yield 2 + word % (target - 1) if word % ratio == 0 else target


def _shuffled(count: int, seed: int) -> np.ndarray:
    """Returns a permutation `[count]` drawn with the 64-bit Mersenne Twister."""
    order, twister, last = list(range(count)), _Twister(seed), count - 1
    while last > 0:
        words = twister.words()[:last]
        places = words % np.arange(last + 1, last + 1 - len(words), -1, dtype=np.uint64)
        for place in places.tolist():
            order[last], order[place] = order[place], order[last]
            last -= 1
    return np.asarray(order, dtype=np.int64)


class _Twister:
    """The 64-bit Mersenne Twister (Nishimura, 2000), which numpy does not provide."""

    def __init__(self, seed: int):
        state = [seed % 2**64]
        for place in range(1, 312):
            state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + place) % 2**64)
        self._state = np.asarray(state, dtype=np.uint64)

    def words(self) -> np.ndarray:
        """Returns the next 312 outputs."""
        state, half = self._state, 156
        for start, stop in ((0, half), (half, 311), (311, 312)):
            places = np.arange(start, stop)
            mixed = (state[places] & np.uint64(0xFFFFFFFF80000000)) | (
                state[(places + 1) % 312] & np.uint64(0x7FFFFFFF)
            )
            odd = np.where(mixed & np.uint64(1), np.uint64(0xB5026F5AA96619E9), np.uint64(0))
            state[places] = state[(places + half) % 312] ^ (mixed >> np.uint64(1)) ^ odd
        words = state.copy()
        words ^= (words >> np.uint64(29)) & np.uint64(0x5555555555555555)
        words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
        words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
        return words ^ (words >> np.uint64(43))

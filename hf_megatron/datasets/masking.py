"""Random selection of the masked tokens of a sample, as in Megatron-Core's `MaskedWordPieceDataset`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import DataError

# Parameter of the geometric distribution of span lengths (Joshi et al., 2020, "SpanBERT", 3.1).
_GEOMETRIC = 0.2


@dataclass(frozen=True)
class Masking:
    """Masking options of a sample, as in `MaskedWordPieceDatasetConfig`.

    Args:
        probability (`float`, defaults to 0.15): share of masked tokens, `--mask-prob`.
        short_sequence_probability (`float`, defaults to 0.1): probability of a shorter sample, `--short-seq-prob`.
        max_ngram (`int`, defaults to 3): most consecutive words masked together; Megatron-LM's T5 has 10.
        full_words (`bool`, defaults to `True`): whether word pieces that begin with `##` are masked with their word.
        longer_ngrams (`bool`, defaults to `False`): whether longer n-grams are more likely than short ones.
        geometric (`bool`, defaults to `False`): whether n-gram lengths follow SpanBERT's geometric distribution, as in
            Megatron-LM's T5.

    Raises:
        DataError: values out of range.
    """

    probability: float = 0.15
    short_sequence_probability: float = 0.1
    max_ngram: int = 3
    full_words: bool = True
    longer_ngrams: bool = False
    geometric: bool = False

    def __post_init__(self) -> None:
        values = self.probability, self.short_sequence_probability, self.max_ngram
        if not all(isinstance(number, Real) for number in values) or not (
            0 < self.probability < 1 and 0 <= self.short_sequence_probability <= 1 and self.max_ngram >= 1
        ):
            raise DataError(f"{self}: expected probabilities between 0 and 1, and max_ngram of 1 or more.")

    def ngram_shares(self) -> np.ndarray:
        """Returns the cumulative probabilities `[max_ngram]` of n-grams with 1, 2, ... words."""
        shares = 1.0 / (np.arange(self.max_ngram, dtype=np.int64) + 1)
        shares = shares / shares.sum(keepdims=True)
        if self.longer_ngrams:
            shares = shares[::-1]
        ends = (shares / shares.sum(keepdims=True)).cumsum()
        return ends / ends[-1]


class Vocabulary:
    """Properties of a transformers tokenizer that masking needs.

    Args:
        tokenizer: a WordPiece tokenizer, such as BERT's; with others every token is a word.

    Attributes:
        ids: of all tokens.
        is_piece: `[ids]`: whether a token continues a word.

    Raises:
        DataError: not a tokenizer.
    """

    def __init__(self, tokenizer: Any):
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise DataError(f"tokenizer = {tokenizer!r}: expected a transformers tokenizer.")
        tokens = {number: token for token, number in tokenizer.get_vocab().items()}
        self.ids = sorted(tokens)
        self.is_piece = np.zeros(self.ids[-1] + 1, dtype=bool)
        self.is_piece[[number for number, token in tokens.items() if token.startswith("##")]] = True
        self.cls, self.sep, self.mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self.pad, self.bos, self.eos = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
        self.size = len(self.is_piece)

    def require(self, *names: str) -> None:
        """Checks that the tokenizer has the named special tokens.

        Raises:
            DataError: it lacks one.
        """
        for name in names:
            if vars(self)[name] is None:
                raise DataError(f"the tokenizer has no {name}_token.")


def masked_spans(
    tokens: Sequence[int],
    target_length: int,
    masking: Masking,
    vocabulary: Vocabulary,
    stream: np.random.RandomState,
    replace: Callable[[int, np.random.RandomState], int],
) -> tuple[list[int], list[list[int]]]:
    """Returns the tokens with some of them replaced, and the positions of each replaced span, in order.

    Args:
        tokens: of a sample, its special tokens included.
        target_length (`int`): target number of tokens of the sample, without special tokens.
        masking: options.
        vocabulary: of the tokens.
        stream: random state of the sample.
        replace: returns the replacement of a token.
    """
    words: list[list[int]] = []
    kept = (vocabulary.cls, vocabulary.sep)
    for place, token in enumerate(tokens):
        if token in kept:
            continue
        if masking.full_words and words and vocabulary.is_piece[token]:
            words[-1].append(place)
        else:
            words.append([place])
    most = min(masking.probability * target_length, max(1, int(round(len(tokens) * masking.probability))))
    order, shares = list(range(len(words))), masking.ngram_shares()
    stream.shuffle(order)
    masked_tokens, spans, done = list(tokens), [], set[int]()
    for word in order:
        if len(done) >= most:
            break
        if masking.geometric:
            count = min(int(stream.geometric(_GEOMETRIC)), masking.max_ngram)
        else:
            count = int(shares.searchsorted(stream.random_sample(), side="right")) + 1
        span = _fitting(words, word, count, most - len(done))
        if span is None or not done.isdisjoint(span):
            continue
        done.update(span)
        for place in span:
            masked_tokens[place] = replace(tokens[place], stream)
        spans.append(span)
    return masked_tokens, sorted(spans)


def _fitting(words: Sequence[Sequence[int]], first: int, count: int, most: float) -> list[int] | None:
    """Returns the positions of `count` words, or of as many fewer as fit; `None` if not even one fits."""
    for number in range(count, 0, -1):
        span = list(chain.from_iterable(words[first : first + number]))
        if len(span) <= most:
            return span
    return None

"""Masked-language-modeling datasets for BERT and T5, as in Megatron-Core."""

import os
from collections.abc import Sequence
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .indexed import IndexedDataset
from .masking import Masking, masked_spans
from .pretraining import require_values
from .sentences import SentencesDataset

_IGNORED = -100


class BertDataset(SentencesDataset):
    """Samples of masked sentences from a pair of `.bin` and `.idx`: `BERTMaskedWordPieceDataset` of Megatron-Core.

    A sample has `input_ids`, `token_type_ids`, `attention_mask` and `labels` `[sequence_length]`, with labels -100 for
    unmasked tokens, and with sentence pairs `next_sentence_label` `()`, 1 if they are swapped. Models are
    `BertForPreTraining`, or `BertForMaskedLM` without pairs.

        BertDataset("corpus_text_sentence", 512, samples, tokenizer=tokenizer)

    Args:
        source: as in `PretrainingDataset`; its sequences are sentences.
        sequence_length (`int`): tokens of a sample, `[CLS]` and `[SEP]` included.
        samples (`int`, *optional*): epochs are added until there are enough; by default one epoch.
        tokenizer: of transformers, with `[CLS]`, `[SEP]`, `[MASK]` and `[PAD]`.
        masking (`Masking`, *optional*): masking options.
        pairs (`bool`, defaults to `True`): whether samples have two parts, with a label for whether they are swapped
            (`False` is `--bert-no-binary-head`).
        seed (`int`, defaults to 1234): Megatron's `--seed`.
        share: as in `PretrainingDataset`, of documents.
        cache: as in `PretrainingDataset`.

    Raises:
        DataError: as in `PretrainingDataset`, a tokenizer without these tokens, or documents that make no sample.
    """

    kind = "bert"
    _added = 3
    _needs = ("cls", "sep", "mask", "pad")

    def __init__(
        self,
        source: IndexedDataset | str | os.PathLike[str],
        sequence_length: int,
        samples: int | None = None,
        *,
        tokenizer: Any,
        masking: Masking | None = None,
        pairs: bool = True,
        seed: int = 1234,
        share: tuple[float, float] = (0.0, 1.0),
        cache: str | os.PathLike[str] | None = None,
    ):
        self.pairs = pairs
        least = 2 if pairs else 1
        masking = Masking() if masking is None else masking
        self._build(source, sequence_length, samples, tokenizer, masking, least, seed, share, cache)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        sentences, target, stream = self._sentences(sample)
        if any(special in sentence for sentence in sentences for special in (self.vocabulary.cls, self.vocabulary.sep)):
            raise DataError(
                f"{self.source.data_path}: the sentences contain [CLS] or [SEP], which are added to the samples. "
                "Tokenize with add_special_tokens=False."
            )
        pivot, is_swapped = len(sentences), False
        if self.pairs:
            pivot = 1 if len(sentences) < 3 else int(stream.randint(low=1, high=len(sentences)))
            is_swapped = bool(stream.random_sample() < 0.5)
        one, other = (list(chain.from_iterable(part)) for part in (sentences[:pivot], sentences[pivot:]))
        if is_swapped:
            one, other = other, one
        _shorten(one, other, target, stream)
        words, length = self.vocabulary, self.sequence_length
        tokens, types = [words.cls, *one, words.sep], [0] * (len(one) + 2)
        if other:
            tokens, types = [*tokens, *other, words.sep], types + [1] * (len(other) + 1)
        masked, spans = masked_spans(tokens, target, self.masking, words, stream, self._replaced)
        labels = np.full(length, _IGNORED, dtype=np.int64)
        places = list(chain.from_iterable(spans))
        labels[places] = [tokens[place] for place in places]
        features = {
            "input_ids": _filled(masked, length, words.pad),
            "token_type_ids": _filled(types, length, 0),
            "attention_mask": _filled([int(token != words.pad) for token in masked], length, 0),
            "labels": torch.from_numpy(labels),
        }
        if self.pairs:
            features["next_sentence_label"] = torch.tensor(int(is_swapped))
        return features

    def _replaced(self, token: int, stream: np.random.RandomState) -> int:
        """Returns the mask token with probability 0.8, a random token with 0.1, and otherwise the token itself."""
        if stream.random_sample() < 0.8:
            return int(self.vocabulary.mask)
        if stream.random_sample() >= 0.5:
            return self.vocabulary.ids[stream.randint(0, len(self.vocabulary.ids))]
        return token


class T5Dataset(SentencesDataset):
    """Samples for span prediction from a pair of `.bin` and `.idx`: `T5MaskedWordPieceDataset` of Megatron-Core.

    A sample has `input_ids` and `attention_mask` `[sequence_length]`, and `labels`, `decoder_input_ids` and
    `decoder_attention_mask` `[target_length]`; labels are padded with -100.

        T5Dataset("corpus_text_sentence", 512, 128, samples, tokenizer=tokenizer)

    Args:
        source: as in `BertDataset`.
        sequence_length (`int`): tokens of the encoder.
        target_length (`int`): tokens of the decoder, Megatron-LM's `--decoder-seq-length`.
        samples (`int`, *optional*): as in `BertDataset`.
        tokenizer: of transformers, with an `eos_token`. Megatron uses a BERT tokenizer with added sentinels.
        sentinels (*optional*): ids that replace spans, in the order of the spans; by default `<extra_id_0>` and so on.
        begin (`int`, *optional*): first token of the decoder; by default the `bos_token`, else the `pad_token`, as for
            T5 in transformers.
        masking (`Masking`, *optional*): by default Megatron-LM's masking for T5.
        seed, share, cache: as in `BertDataset`.

    Raises:
        DataError: as in `BertDataset`; a sample with more spans than sentinels, or more tokens than `target_length`.
    """

    kind = "t5"
    _added = 2
    _needs = ("pad", "eos")

    def __init__(
        self,
        source: IndexedDataset | str | os.PathLike[str],
        sequence_length: int,
        target_length: int,
        samples: int | None = None,
        *,
        tokenizer: Any,
        sentinels: Sequence[int] | None = None,
        begin: int | None = None,
        masking: Masking | None = None,
        seed: int = 1234,
        share: tuple[float, float] = (0.0, 1.0),
        cache: str | os.PathLike[str] | None = None,
    ):
        require_values(source, share, {"target_length": target_length})
        if target_length < 2:
            raise DataError(f"target_length = {target_length}: expected 2 or more.")
        masking = Masking(max_ngram=10, geometric=True) if masking is None else masking
        self._build(source, sequence_length, samples, tokenizer, masking, 1, seed, share, cache)
        self.target_length = int(target_length)
        self.sentinels = _sentinels(tokenizer) if sentinels is None else list(sentinels)
        if not self.sentinels:
            raise DataError(
                "The tokenizer has no <extra_id_0>. Pass sentinels=, the token ids that replace masked spans."
            )
        for name, tokens in (("sentinels", self.sentinels), ("begin", [] if begin is None else [begin])):
            if not all(isinstance(token, Integral) and 0 <= token < self.vocabulary.size for token in tokens):
                raise DataError(f"{name} = {tokens}: expected token ids below {self.vocabulary.size}.")
        known = [token for token in (begin, self.vocabulary.bos, self.vocabulary.pad) if token is not None]
        self.begin = known[0]
        self.order_key["target_length"] = self.target_length

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        sentences, target, stream = self._sentences(sample)
        tokens = list(chain.from_iterable(sentences))[:target]
        words = self.vocabulary
        _, spans = masked_spans(tokens, target, self.masking, words, stream, lambda token, stream: token)
        if len(spans) > len(self.sentinels):
            raise DataError(
                f"sample {sample} has {len(spans)} masked spans, but there are only {len(self.sentinels)} sentinels."
            )
        encoder, decoder, done = [], [self.begin], 0
        for sentinel, span in zip(self.sentinels, spans, strict=False):
            encoder += [*tokens[done : span[0]], sentinel]
            decoder += [sentinel, *(tokens[place] for place in span)]
            done = span[-1] + 1
        encoder += tokens[done:]
        if len(decoder) > self.target_length:
            raise DataError(
                f"target_length = {self.target_length}: sample {sample} has {len(decoder)} tokens for the decoder."
            )
        length, labels = self.sequence_length, [*decoder[1:], words.eos]
        return {
            "input_ids": _filled(encoder, length, words.pad),
            "attention_mask": _filled([int(token != words.pad) for token in encoder], length, 0),
            "decoder_input_ids": _filled(decoder, self.target_length, words.pad),
            "decoder_attention_mask": _filled([1] * len(decoder), self.target_length, 0),
            "labels": _filled(labels, self.target_length, _IGNORED),
        }


def _sentinels(tokenizer: Any) -> list[int]:
    tokens: dict[str, int] = tokenizer.get_vocab()
    sentinels: list[int] = []
    while (name := f"<extra_id_{len(sentinels)}>") in tokens:
        sentinels.append(tokens[name])
    return sentinels


def _filled(values: Sequence[int], length: int, value: int) -> Tensor:
    padded = torch.full((length,), value, dtype=torch.int64)
    padded[: len(values)] = torch.tensor(values, dtype=torch.int64)
    return padded


def _shorten(one: list[int], other: list[int], target: int, stream: np.random.RandomState) -> None:
    """Removes random end tokens of the longer part until both parts together have `target` tokens."""
    while len(one) + len(other) > target:
        longer = one if len(one) > len(other) else other
        del longer[0 if stream.random_sample() < 0.5 else -1]

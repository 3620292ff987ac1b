"""Shared base of BERT and T5 datasets: sentences of each sample, and the tokenizer."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import DataError
from .index_cache import MappedArrays, cached_arrays
from .indexed import IndexedDataset
from .masking import Masking, Vocabulary
from .ordered_dataset import OrderedDataset
from .pretraining import require_values
from .sample_index import compute_split_bounds
from .sentence_index import sentence_order


class SentencesDataset(MappedArrays, OrderedDataset):
    """Base class of BERT and T5 datasets: `MaskedWordPieceDataset` of Megatron-Core.

    Sequences of the pair are sentences, and a sample does not cross documents.
    """

    is_shifted = False
    kind: ClassVar[str]
    # Special tokens added to the sentences of a sample.
    _added: ClassVar[int]
    _needs: ClassVar[tuple[str, ...]]

    def _build(
        self,
        source: IndexedDataset | str | os.PathLike[str],
        sequence_length: int,
        samples: int | None,
        tokenizer: Any,
        masking: Masking,
        least_sentences: int,
        seed: int,
        share: tuple[float, float],
        cache: str | os.PathLike[str] | None,
    ) -> None:
        require_values(source, share, {"sequence_length": sequence_length, "samples": samples, "seed": seed})
        if sequence_length < self._added + 2 or seed < 1 or (samples is not None and samples < 1):
            raise DataError(
                f"sequence_length = {sequence_length}, samples = {samples}, seed = {seed}: expected {self._added + 2} "
                "or more for sequence_length, and 1 or more for the others."
            )
        if not isinstance(masking, Masking):
            raise DataError(f"masking = {masking!r}: expected a Masking.")
        self.source = source if isinstance(source, IndexedDataset) else IndexedDataset(source)
        self.sequence_length, self.masking, self.seed = int(sequence_length), masking, int(seed)
        self.vocabulary = Vocabulary(tokenizer)
        self.vocabulary.require(*self._needs)
        documents = len(self.source.documents) - 1
        first, stop = compute_split_bounds(share, documents)
        if not 0 <= first < stop <= documents:
            raise DataError(f"{self.source.prefix}: none of its {documents} documents is in the share {share}.")
        settings: dict[str, Any] = {
            "split": [first, stop],
            "target_length": self.sequence_length - self._added,
            "samples": None if samples is None else int(samples),
            "seed": self.seed,
            "short_probability": masking.short_sequence_probability,
            "least_sentences": least_sentences,
        }

        def make() -> Mapping[str, np.ndarray]:
            kwargs = {name: value for name, value in settings.items() if name != "split"}
            order, epochs = sentence_order(
                self.source.lengths, np.asarray(self.source.documents[first : stop + 1]), **kwargs
            )
            return {"order": order, "epochs": np.asarray(epochs)}

        written = self.source.index_path.stat().st_mtime_ns
        key = {"of": "sentences", "files": self.source.facts(), "written": written, **settings}
        arrays = cached_arrays(key, None if cache is None else Path(cache), make)
        self.order = arrays["order"]
        self.order_key = {
            "kind": self.kind,
            "files": self.source.facts(),
            **{name: value for name, value in settings.items() if name != "samples"},
            "epochs": int(arrays["epochs"]),
            "masking": asdict(masking),
            "vocabulary": self.vocabulary.size,
        }

    def __len__(self) -> int:
        return len(self.order)

    def _sentences(self, sample: int) -> tuple[list[list[int]], int, np.random.RandomState]:
        """Returns the sentences of a sample, its target number of tokens, and its random state."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        first, stop, target = self.order[sample].tolist()
        sentences = [self.source[sentence].tolist() for sentence in range(first, stop)]
        most = max(map(max, filter(None, sentences)), default=0)
        if most >= self.vocabulary.size:
            raise DataError(
                f"{self.source.data_path}: contains token {most}, but the tokenizer has {self.vocabulary.size} tokens."
            )
        return sentences, target, np.random.RandomState((self.seed + sample) % 2**32)

"""Fixed-length pretraining samples in Megatron's order, for Trainer, Accelerate, and plain loops."""

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .index_cache import cached_arrays
from .indexed import IndexedDataset
from .megatron_cache import default_folder, megatron_arrays
from .ordered_dataset import OrderedDataset
from .sample_index import SampleOrder, compute_split_bounds, count_epochs, sample_order

_IGNORED = -100
# Placeholder for padding if no `pad_token` is set.
_NOTHING = -1
_RESTARTS = ("eod", "documents")


class PretrainingDataset(OrderedDataset):
    """Fixed-length samples from a pair of `.bin` and `.idx`, as in `GPTDataset` of Megatron-Core.

    A sample has `input_ids` `[sequence_length]`, and `labels` and `shift_labels`, which both have the next tokens: with
    `labels` alone, transformers models would shift them. Labels of padding are ignored (-100).

        PretrainingDataset("corpus_text_document", sequence_length=4096, samples=steps * global_batch_size)

    Args:
        source: path of both files without `.bin` and `.idx`, or an `IndexedDataset`.
        sequence_length (`int`): tokens of a sample.
        samples (`int`, *optional*): number of samples needed; one full epoch by default. It affects the order if more
            than one epoch is needed.
        seed (`int`, defaults to 1234): Megatron's `--seed`.
        share (`tuple[float, float]`, defaults to all): range of the sequences, as returned by `parse_split`.
        extra_token (`bool`, defaults to `True`): Megatron's `add_extra_token_to_sequence`.
        drop_last_partial (`bool`, defaults to `True`): Megatron's `drop_last_partial_validation_sequence`.
        pad_token (`int`, *optional*): labels with this token are ignored. Leave it out if it is also the token that
            ends documents.
        eod_token (`int`, *optional*): token that ends documents; needed for the next two.
        eod_mask_loss (`bool`, defaults to `False`): whether labels that follow that token are ignored.
        restart (`str`, *optional*): `"eod"` restarts `position_ids` after each such token, `"documents"` at each
            document boundary; models then attend within documents.
        cache (`str` or `Path`, *optional*): folder for the indices, which are otherwise built in memory.

    Raises:
        DataError: values out of range, damaged files, or no sample.
    """

    def __init__(
        self,
        source: IndexedDataset | str | os.PathLike[str],
        sequence_length: int,
        samples: int | None = None,
        *,
        seed: int = 1234,
        share: tuple[float, float] = (0.0, 1.0),
        extra_token: bool = True,
        drop_last_partial: bool = True,
        pad_token: int | None = None,
        eod_token: int | None = None,
        eod_mask_loss: bool = False,
        restart: str | None = None,
        cache: str | os.PathLike[str] | None = None,
    ):
        require_values(source, share, {"sequence_length": sequence_length, "samples": samples, "seed": seed})
        self.source = source if isinstance(source, IndexedDataset) else IndexedDataset(source)
        if self.source.dtype.kind not in "iu":
            raise DataError(f"{self.source.data_path}: has dtype {self.source.dtype}, expected an integer dtype.")
        largest = np.iinfo(self.source.dtype).max
        for name, token in (("pad_token", pad_token), ("eod_token", eod_token)):
            if token is not None and not (isinstance(token, Integral) and 0 <= token <= largest):
                raise DataError(f"{name} = {token!r}: expected a token id from 0 to {largest}.")
        if restart is not None and restart not in _RESTARTS:
            raise DataError(f"restart = {restart!r}: expected None, 'eod' or 'documents'.")
        if eod_token is None and (eod_mask_loss or restart == "eod"):
            raise DataError("eod_mask_loss and restart='eod' require eod_token=, the token that ends documents.")
        self.sequence_length, self.pad_token, self.eod_token = sequence_length, pad_token, eod_token
        self.eod_mask_loss, self.restart = eod_mask_loss, restart
        self._asked: dict[str, Any] = {
            "sequence_length": int(sequence_length),
            "samples": None if samples is None else int(samples),
            "seed": int(seed),
            "extra_token": extra_token,
            "drop_last_partial": drop_last_partial,
        }
        self._share = share
        first, stop = compute_split_bounds(share, len(self.source))
        if not 0 <= first < stop <= len(self.source):
            raise DataError(f"{self.source.prefix}: none of its {len(self.source)} sequences is in the share {share}.")
        self._cache = None if cache is None else Path(cache)
        self.order = self._ordered(first, stop)
        self.order_key = {
            "kind": "pretraining",
            "files": self.source.facts(),
            "split": [first, stop],
            "epochs": self._made_of["epochs"],
            **{name: value for name, value in self._asked.items() if name != "samples"},
        }

    def _ordered(self, first: int, stop: int) -> SampleOrder:
        settings, index = dict(self._asked), self.source.index_path.stat()
        extra, length = int(settings["extra_token"]), settings["sequence_length"]
        tokens = self.source.tokens_between(first, stop)
        if length < 1 or (settings["samples"] is not None and settings["samples"] < 1) or tokens == 0:
            # Raises the error about these values.
            self._made(first, stop)
        epochs, before = count_epochs(tokens, length, settings.pop("samples"), extra)
        # Runs of different lengths have the same order if they need the same number of epochs.
        self._made_of = {"epochs": [epochs, before], "split": [first, stop], **settings}

        def make() -> Mapping[str, np.ndarray]:
            order = self._made(first, stop)
            return {"documents": order.document_index, "starts": order.sample_index, "shuffle": order.shuffle_index}

        for folder in filter(None, (self._cache, default_folder(self.source.prefix))):
            cached = megatron_arrays(
                folder, self.source.prefix, self.source.lengths, (first, stop), tokens, epochs, self._share, self._asked
            )
            if cached is not None:
                return SampleOrder(cached["documents"], cached["starts"], cached["shuffle"], length, extra, epochs)
        key = {"of": "samples", "files": self.source.facts(), "written": index.st_mtime_ns, **self._made_of}
        arrays = cached_arrays(key, self._cache, make)
        return SampleOrder(arrays["documents"], arrays["starts"], arrays["shuffle"], length, extra, epochs)

    def _made(self, first: int, stop: int) -> SampleOrder:
        return sample_order(self.source.lengths, np.arange(first, stop, dtype=np.int32), **self._asked)

    def described(self) -> tuple[str, tuple[float, float], dict[str, Any]]:
        """Returns Megatron-LM's description of the dataset: prefix, share of the split, and requested values."""
        return self.source.prefix, self._share, self._asked

    def __len__(self) -> int:
        return len(self.order)

    def tokens(self, sample: int) -> tuple[np.ndarray, list[int]]:
        """Returns a sample's tokens, `[sequence_length + 1]` or fewer, and the number from each of its documents."""
        read = self.source.read
        try:
            parts = [
                read(document, start, None if count < 0 else count)
                for document, start, count in self.order.pieces(sample)
            ]
        except IndexError as error:
            kept = "" if self._cache is None else f": the cached indices in {self._cache} are damaged, remove them"
            raise DataError(f"{self.source.prefix}: sample {sample} is out of range ({error}){kept}.") from None
        return np.concatenate(parts).astype(np.int64), [len(part) for part in parts]

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        tokens, sizes = self.tokens(sample)
        length, extra = self.sequence_length, self.order.extra
        pad = _NOTHING if self.pad_token is None else self.pad_token
        missing = length + extra - len(tokens)
        if missing > 0:
            tokens = np.concatenate([tokens, np.full(missing, pad, np.int64)])
        if extra:
            inputs, labels = tokens[:-1], tokens[1:]
        else:
            inputs, labels = tokens, np.append(tokens[1:], pad)
        labels = np.where(labels == pad, _IGNORED, labels)
        if self.eod_mask_loss:
            labels[inputs == self.eod_token] = _IGNORED
        features = {
            "input_ids": torch.from_numpy(np.where(inputs == pad, 0, inputs)),
            "labels": torch.from_numpy(labels),
            "shift_labels": torch.from_numpy(labels),
        }
        if self.restart is not None:
            features["position_ids"] = torch.from_numpy(self._positions(inputs, sizes))
        return features

    def _positions(self, inputs: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        places = np.arange(len(inputs), dtype=np.int64)
        begins = np.flatnonzero(inputs == self.eod_token) + 1 if self.restart == "eod" else np.cumsum(sizes)
        begins = np.unique(begins[begins < len(inputs)])
        if not len(begins):
            return places
        starts = np.zeros(len(inputs), dtype=np.int64)
        starts[begins] = begins
        return places - np.maximum.accumulate(starts)


def require_values(source: Any, share: Any, integers: Mapping[str, Any]) -> None:
    """Checks the types of a dataset's arguments.

    Raises:
        DataError: an argument has another type than expected.
    """
    if not isinstance(source, IndexedDataset | str | os.PathLike):
        raise DataError(f"source = {source!r}: expected a path without .bin and .idx, or an IndexedDataset.")
    for name, number in integers.items():
        if not isinstance(number, Integral) and not (number is None and name == "samples"):
            raise DataError(f"{name} = {number!r}: expected an integer.")
    if not 0 <= integers.get("seed", 0) < 2**32:
        raise DataError(f"seed = {integers['seed']}: expected a number from 0 to {2**32 - 1}.")
    if not isinstance(share, Sequence) or [isinstance(end, Real) for end in share] != [True, True]:
        raise DataError(f"share = {share!r}: expected two numbers, as returned by parse_split.")

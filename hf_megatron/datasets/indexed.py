"""Megatron's indexed datasets: tokens of all sequences back to back in `.bin`, and their offsets in `.idx`.

The format is defined in `megatron/core/datasets/indexed_dataset.py`: a header, lengths (int32) and byte offsets (int64)
of all sequences, and the document array (int64) with the first sequence of each document, followed by the number of
sequences. Multimodal files have a mode (int8) for each sequence after it.
"""

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
# Magic of fairseq's formats (memory-mapped and not), which old Megatron versions wrote.
_FAIRSEQ = b"TNTIDX\x00\x00"
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name)
    for code, name in {
        1: "uint8",
        2: "int8",
        3: "int16",
        4: "int32",
        5: "int64",
        6: "float64",
        7: "float32",
        8: "uint16",
    }.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# Megatron's writer uses two bytes per token for vocabularies smaller than this.
_SMALL_VOCABULARY = 65500


# A file's fingerprint hashes this many places of this many bytes.
_SAMPLES, _SAMPLED = 64, 4096


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Returns the dtype that Megatron's writer uses for tokens of a vocabulary (`DType.optimal_dtype`)."""
    return np.dtype("uint16" if vocab_size is not None and vocab_size < _SMALL_VOCABULARY else "int32")


class IndexedDataset:
    """Token sequences of a pair of files, memory-mapped; the time to open does not depend on the file sizes.

    Args:
        prefix (`str` or `Path`): path of both files without `.bin` and `.idx`.
        multimodal (`bool`, defaults to `False`): whether the file has a mode for each sequence, which its header does
            not state.

    Raises:
        DataError: a file that is missing, damaged, or of another format, or sizes that do not match.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, multimodal: bool = False):
        self.prefix = os.fspath(prefix)
        self.index_path, self.data_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        self.multimodal = multimodal
        self._open()

    def _open(self) -> None:
        for path in (self.index_path, self.data_path):
            if not path.is_file():
                named = (
                    (" Remove the suffix .bin or .idx from the prefix.")
                    if self.prefix.endswith((".bin", ".idx"))
                    else ""
                )
                raise DataError(f"{path}: no such file; an indexed dataset is a pair of .bin and .idx.{named}")
        self.dtype, sequences, ends = self._header()
        self._index = np.memmap(self.index_path, mode="r", dtype=np.uint8)
        expected = HEADER.size + 12 * sequences + 8 * ends + (sequences if self.multimodal else 0)
        if len(self._index) != expected:
            modes = ""
            if len(self._index) == expected + (-sequences if self.multimodal else sequences):
                modes = f" It {'has no' if self.multimodal else 'has a'} mode for each sequence: pass multimodal="
                modes += f"{not self.multimodal}."
            raise DataError(
                f"{self.index_path}: has {len(self._index)} bytes, but its header declares {sequences} sequences and "
                f"{ends} document entries, which need {expected}.{modes}"
            )
        place = HEADER.size
        self.lengths = self._view(place, np.dtype("<i4"), sequences)
        self.offsets = self._view(place + 4 * sequences, np.dtype("<i8"), sequences)
        self.documents = self._view(place + 12 * sequences, np.dtype("<i8"), ends)
        place += 12 * sequences + 8 * ends
        self.modes = self._view(place, np.dtype("i1"), sequences) if self.multimodal else None
        self._check_ends(sequences)
        size = self.data_path.stat().st_size
        # The system cannot map an empty file.
        self._data = np.memmap(self.data_path, mode="r", dtype=self.dtype) if size else np.zeros(0, self.dtype)

    def _header(self) -> tuple[np.dtype, int, int]:
        with open(self.index_path, "rb") as file:
            header = file.read(HEADER.size)
        if header.startswith(_FAIRSEQ):
            raise DataError(
                f"{self.index_path}: fairseq's old format (TNTIDX) is not supported. Rebuild the dataset from its text "
                "with `hf-megatron data build`."
            )
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise DataError(f"{self.index_path}: is not a Megatron index (it does not begin with MMIDIDX).")
        _, version, code, sequences, ends = HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"{self.index_path}: format version {version} is not supported, expected {VERSION}.")
        if code not in DTYPES:
            raise DataError(
                f"{self.index_path}: unknown dtype code {code}, expected one of {', '.join(map(str, DTYPES))}."
            )
        if sequences == 0 or ends < 2:
            raise DataError(f"{self.index_path}: has {sequences} sequences in {max(ends - 1, 0)} documents.")
        return DTYPES[code], sequences, ends

    def _check_ends(self, sequences: int) -> None:
        """Checks the first and last entries, in constant time; `verify` reads all of them."""
        first, last = int(self.documents[0]), int(self.documents[-1])
        if (first, last) != (0, sequences):
            raise DataError(
                f"{self.index_path}: its documents span sequences {first} to {last}, expected 0 to {sequences}."
            )
        size, end = self.data_path.stat().st_size, int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if int(self.offsets[0]) != 0 or size != end:
            raise DataError(
                f"{self.data_path}: has {size} bytes, but the sequences of {self.index_path} end at {end}: one of the "
                "files is truncated or from another pair."
            )

    def _view(self, place: int, dtype: np.dtype, count: int) -> np.ndarray:
        return self._index[place : place + dtype.itemsize * count].view(dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return len(self._data)

    def __getitem__(self, number: int) -> np.ndarray:
        """Returns the tokens `[length]` of a sequence, as stored in the file."""
        return self.read(number)

    def read(self, number: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """Returns tokens `[count]` of a sequence from `start` on; all of them by default."""
        length = int(self.lengths[number])
        stop = length if count is None else start + count
        if not 0 <= start <= stop <= length:
            raise IndexError(f"tokens {start} to {stop} of sequence {number}, which has {length} tokens")
        place = int(self.offsets[number]) // self.dtype.itemsize
        return self._data[place + start : place + stop]

    def tokens_between(self, first: int, stop: int) -> int:
        """Returns the number of tokens of sequences `[first, stop)`."""
        ends = [
            int(self.offsets[one]) if one < len(self) else self.tokens * self.dtype.itemsize for one in (first, stop)
        ]
        return (ends[1] - ends[0]) // self.dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """Returns metadata that identifies the dataset independently of its path, without reading the full files.

        Each file is hashed at evenly spaced places, including both ends.
        """
        hashes = {"index": _sampled(self.index_path), "data": _sampled(self.data_path)}
        return {"sequences": len(self), "tokens": self.tokens, **hashes}

    # Pickling: data loader workers get the paths, and map the files themselves.

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "multimodal": self.multimodal}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["prefix"], multimodal=state["multimodal"])  # type: ignore[misc]

    def verify(self, vocab_size: int | None = None) -> dict[str, int]:
        """Reads everything, and returns counts of sequences, documents and tokens, and the range of the tokens.

        Args:
            vocab_size (`int`, *optional*): exclusive upper bound for tokens.

        Raises:
            DataError: offsets that do not match the lengths, documents out of order, or tokens out of range.
        """
        self.verify_index()
        smallest, largest = self._range()
        if vocab_size is not None and not 0 <= smallest <= largest < vocab_size:
            raise DataError(
                f"{self.data_path}: has tokens from {smallest} to {largest}, but the vocabulary size is {vocab_size}."
            )
        return {
            "sequences": len(self),
            "documents": len(self.documents) - 1,
            "empty sequences": int((self.lengths == 0).sum()),
            "tokens": self.tokens,
            "smallest token": smallest,
            "largest token": largest,
        }

    def verify_index(self) -> None:
        """Reads and checks the full index.

        Raises:
            DataError: offsets that do not match the lengths, or documents out of order.
        """
        if int(self.lengths.min()) < 0:
            raise DataError(f"{self.index_path}: sequence {int(self.lengths.argmin())} has a negative length.")
        sums = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        wrong = np.flatnonzero(self.offsets[1:] != sums[:-1])
        if len(wrong):
            raise DataError(
                f"{self.index_path}: sequence {int(wrong[0]) + 1} does not begin where the one before it ends."
            )
        if int(np.diff(self.documents).min()) < 0:
            place = int(np.diff(self.documents).argmin())
            raise DataError(f"{self.index_path}: document {place + 1} begins before document {place}.")

    def _range(self, block: int = 1 << 24) -> tuple[int, int]:
        ends = [
            (part.min(), part.max())
            for start in range(0, self.tokens, block)
            if len(part := self._data[start : start + block])
        ]
        return (int(min(low for low, _ in ends)), int(max(high for _, high in ends))) if ends else (0, -1)


def _sampled(path: Path) -> str:
    """Returns a hash of places across a file, in a time that does not depend on its size."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for place in np.linspace(0, max(0, size - _SAMPLED), _SAMPLES).astype(np.int64).tolist():
            file.seek(place)
            digest.update(file.read(_SAMPLED))
    return digest.hexdigest()[:16]

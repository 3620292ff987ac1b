"""Writer of Megatron's indexed datasets, and merging of several datasets."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..core.io.safe_paths import replace_file, sync_directory
from ..errors import DataError
from .indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset


class IndexedWriter:
    """Writes a pair of files, which are renamed into place when both are complete.

        with IndexedWriter("corpus_text_document", token_dtype(vocab_size)) as writer:
            for text in texts:
                writer.add_document([tokenizer(text).input_ids])

    Args:
        prefix (`str` or `Path`): path of both files without `.bin` and `.idx`.
        dtype: of tokens.
        multimodal (`bool`, defaults to `False`): whether each sequence has a mode.
        overwrite (`bool`, defaults to `False`): whether existing files are replaced.

    Raises:
        DataError: a dtype that the format does not support, or existing files.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: Any, *, multimodal: bool = False, overwrite: bool = False
    ):
        self.prefix, self.dtype, self.multimodal = os.fspath(prefix), np.dtype(dtype), multimodal
        if self.dtype not in CODES:
            raise DataError(f"IndexedWriter(dtype={self.dtype}): expected one of {', '.join(map(str, CODES))}.")
        self.index_path, self.data_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        if not overwrite and (existing := next((p for p in (self.index_path, self.data_path) if p.exists()), None)):
            raise DataError(
                f"{existing}: already exists; choose another prefix, or set overwrite (overwrite=True, --overwrite)."
            )
        self._partial = self.data_path.with_name(f"{self.data_path.name}.partial-{os.getpid()}")
        self._file: Any = None
        self._lengths: list[int] = []
        self._ends = [0]
        self._modes: list[int] = []

    def __enter__(self) -> "IndexedWriter":
        self.data_path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._partial, "wb")  # noqa: SIM115 - closed in `__exit__`
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        index = self.index_path.with_name(f"{self.index_path.name}.partial-{os.getpid()}")
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            if kind is None:
                self._publish(index)
        finally:
            # Clean up partial files after a failure: the disk may be full.
            self._partial.unlink(missing_ok=True)
            index.unlink(missing_ok=True)

    def _publish(self, index: Path) -> None:
        """Renames both files into place once both are written; existing files stay until then."""
        if not self._lengths:
            raise DataError(f"{self.prefix}: nothing was written.")
        write_index(index, self.dtype, self._lengths, self._ends, self._modes if self.multimodal else None)
        # Remove the old index first: data without an index is not a dataset, so a crash here leaves no mismatched pair.
        self.index_path.unlink(missing_ok=True)
        os.replace(self._partial, self.data_path)
        os.replace(index, self.index_path)
        sync_directory(self.data_path.parent)

    def add_document(self, sequences: Iterable[Any], modes: Sequence[int] | None = None) -> None:
        """Adds a document with some token sequences.

        Raises:
            DataError: tokens out of the dtype's range, or another number of modes.
        """
        arrays = [self._tokens(tokens) for tokens in sequences]
        mode_list = None if modes is None else list(modes)
        if self.multimodal != (mode_list is not None) or (mode_list is not None and len(mode_list) != len(arrays)):
            raise DataError(f"{self.prefix}: got modes {mode_list} for a document of {len(arrays)} sequences.")
        for tokens in arrays:
            self._file.write(tokens.tobytes(order="C"))
            self._lengths.append(tokens.size)
        self._modes += mode_list or ()
        self._ends.append(len(self._lengths))

    def _tokens(self, tokens: Any) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 1:
            raise DataError(
                f"{self.prefix}: a sequence must have one dim, of tokens, got {array.ndim} dims. A document is a list "
                "of sequences."
            )
        cast_array = array.astype(self.dtype)
        if not np.array_equal(array, cast_array):
            wrong = array[array != cast_array][0]
            raise DataError(f"{self.prefix}: token {wrong} does not fit into {self.dtype}.")
        return cast_array

    def add_dataset(self, other: IndexedDataset) -> None:
        """Adds all documents of another dataset with the same dtype.

        Raises:
            DataError: the dtypes differ, or the other's index is damaged.
        """
        other.verify_index()
        if other.dtype != self.dtype or other.multimodal != self.multimodal:
            raise DataError(f"{other.prefix}: has dtype {other.dtype}, but {self.prefix} is written in {self.dtype}.")
        with open(other.data_path, "rb") as file:
            while block := file.read(1 << 24):
                self._file.write(block)
        before = len(self._lengths)
        self._lengths += other.lengths.tolist()
        # Skip the leading 0, which equals the end of the documents written before.
        self._ends += (other.documents[1:] + before).tolist()
        self._modes += [] if other.modes is None else other.modes.tolist()


def write_index(
    path: Path,
    dtype: np.dtype,
    lengths: Sequence[int] | np.ndarray,
    ends: Sequence[int] | np.ndarray,
    modes: Sequence[int] | None = None,
) -> None:
    """Writes an index.

    Args:
        lengths: tokens of each sequence.
        ends: 0, followed by the number of sequences up to the end of each document.
        modes (*optional*): of each sequence.
    """
    sizes = np.asarray(lengths, dtype="<i4")
    offsets = np.zeros(len(sizes), dtype="<i8")
    np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= dtype.itemsize

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(sizes), len(ends)))
            file.write(sizes.tobytes())
            file.write(offsets.tobytes())
            file.write(np.asarray(ends, dtype="<i8").tobytes())
            if modes is not None:
                file.write(np.asarray(modes, dtype="i1").tobytes())
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write)
    sync_directory(path.parent)


def merge_datasets(prefix: str | os.PathLike[str], sources: Sequence[str | os.PathLike[str]], **options: Any) -> None:
    """Writes the documents of several datasets sequentially into one.

    Raises:
        DataError: a source that cannot be read or has another dtype, or an existing target.
    """
    opened = [IndexedDataset(source) for source in sources]
    if not opened:
        raise DataError(f"{prefix}: nothing to merge.")
    with IndexedWriter(prefix, opened[0].dtype, **options) as writer:
        for dataset in opened:
            writer.add_dataset(dataset)

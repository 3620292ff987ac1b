"""Texts from files, one document at a time, starting at any document."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError

_EXTRA = 'tables need datasets: pip install "hf_megatron[data]"'
# Rows of a table read at a time.
_ROWS = 1024


def iter_texts(paths: Sequence[Path], key: str, start: int = 0) -> Iterator[str]:
    """Yields the documents of files in order.

    | source | document |
    |---|---|
    | `.jsonl`, `.json`, `.jsonl.gz`, `.json.gz` | value of the key in each line |
    | `.parquet` | value of the column in each row |
    | `.txt`, `.txt.gz` | the full file |
    | a folder of `datasets.save_to_disk` | value of the column in each row |

    Args:
        paths: in reading order.
        key (`str`): of a JSON object, or a column.
        start (`int`, defaults to 0): number of documents to skip.

    Raises:
        DataError: a file of another kind, a line that is no object with a text under the key, or a missing column.
    """
    for path in paths:
        kind = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
        if path.is_dir():
            texts, size = _dataset_samples(path, key, start)
        elif kind == ".parquet":
            texts, size = _parquet_samples(path, key, start)
        elif kind in (".jsonl", ".json", ".jsonl.gz", ".json.gz"):
            yield from (lines := _Lines(path, key, start))
            texts, size = iter(()), lines.count
        elif kind in (".txt", ".txt.gz"):
            texts, size = iter([] if start else [_read_text(path)]), 1
        else:
            raise DataError(f"{path}: expected .jsonl, .parquet, .txt or a folder written by datasets.save_to_disk.")
        yield from texts
        start = max(0, start - size)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a file, and raises `DataError` with its path if it is damaged."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: is not a complete gzip file ({error}).") from None


def _read_text(path: Path) -> str:
    with _opened(path) as file:
        return _decoded(file.read(), path)


def _decoded(content: bytes, place: Any) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: is not UTF-8 ({error.reason} at byte {error.start}).") from None


class _Lines:
    """Texts of a JSON Lines file; counts the documents while reading."""

    def __init__(self, path: Path, key: str, start: int):
        self.path, self.key, self.start, self.count = path, key, start, 0

    def __iter__(self) -> Iterator[str]:
        with _opened(self.path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                self.count += 1
                if self.count > self.start:
                    yield self._text(line, f"{self.path}:{number}")

    def _text(self, line: bytes, place: str) -> str:
        try:
            said = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: is not JSON ({error}).") from None
        if not isinstance(said, dict) or self.key not in said:
            known = ", ".join(said) if isinstance(said, dict) else type(said).__name__
            raise DataError(f"{place}: has no {self.key!r}, but {known}.")
        return _text(said[self.key], place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: expected a string, got {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: has a lone surrogate at {error.start}.") from None
    return value


def _parquet_samples(path: Path, key: str, start: int) -> tuple[Iterator[str], int]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: {_EXTRA}") from None
    try:
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: {error}") from None
    if key not in file.schema_arrow.names:
        raise DataError(f"{path}: has no column {key!r}, but {', '.join(file.schema_arrow.names)}.")

    def rows() -> Iterator[str]:
        number = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if number + size > start:
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[key]):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        if number > start:
                            yield _text(value, f"{path}: row {number}")
            else:
                number += size

    return rows(), file.metadata.num_rows


def _dataset_samples(path: Path, key: str, start: int) -> tuple[Iterator[str], int]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise DataError(f"{path}: {_EXTRA}") from None
    try:
        dataset = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(dataset, Dataset) or key not in dataset.column_names:
        has = f"columns {', '.join(dataset.column_names)}" if isinstance(dataset, Dataset) else "several splits"
        raise DataError(f"{path}: expected a dataset with a column {key!r}; it has {has}.")

    def rows() -> Iterator[str]:
        for first in range(start, len(dataset), _ROWS):
            for place, value in enumerate(dataset[first : first + _ROWS][key], first + 1):
                yield _text(value, f"{path}: row {place}")

    return rows(), len(dataset)

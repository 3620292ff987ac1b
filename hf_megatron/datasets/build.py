"""Builder of `.bin` and `.idx` pairs from texts, as fast as the tokenizer, which resumes after a kill.

Intermediate results are in a folder `PREFIX.building` until the build is complete: tokens, lengths, document ends, and
the number of documents done. Megatron-LM's `tools/preprocess_data.py` writes the same bytes.
"""

import copy
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..compat.ecosystem import enlarge_word_cache
from ..core.io.safe_paths import replace_file, sync_directory
from ..errors import DataError
from .indexed import token_dtype
from .indexed_writer import write_index
from .text_sources import iter_texts

# Documents passed to the tokenizer at a time, which it distributes over its threads.
_BATCH = 256
# Word cache of the tokenizer, about 100 bytes per word: texts have more words than its default of 10,000.
_WORDS = 1_000_000
# Seconds between progress records: the work that a kill may lose.
_KEPT_EVERY = 10.0


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build.

    Attributes:
        documents, tokens (`int`): written so far, including earlier runs of the build.
        characters (`int`): read in this run.
        seconds (`float`): duration of this run.
        new_tokens (`int`): written in this run.
    """

    documents: int
    tokens: int
    characters: int
    seconds: float
    new_tokens: int

    def __str__(self) -> str:
        rate = self.new_tokens / self.seconds if self.seconds else 0.0
        speed = self.characters / self.seconds / 1e6 if self.seconds else 0.0
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {rate:,.0f} tokens and {speed:,.1f} million "
            "characters a second"
        )


def build_pair(
    prefix: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    key: str = "text",
    append_eod: bool = False,
    special_tokens: bool = True,
    say: Callable[[BuildProgress], None] = lambda progress: None,
) -> BuildProgress:
    """Writes the tokens of texts into a pair of files; resumes a build that was begun with the same arguments.

    Args:
        prefix (`str` or `Path`): path of both files without `.bin` and `.idx`.
        sources: files, as in `iter_texts`.
        tokenizer: of transformers.
        key (`str`, defaults to `"text"`): key of the text in a JSON object, or its column.
        append_eod (`bool`, defaults to `False`): whether a document ends with the tokenizer's `eos_token`.
        special_tokens (`bool`, defaults to `True`): whether documents get the special tokens that the tokenizer adds,
            such as a BOS. This is Megatron-LM's default; `False` is `--tokenizer-hf-no-include-special-tokens`.
        say (`Callable`, *optional*): called with the progress every few seconds.

    Raises:
        DataError: missing sources, an existing target, a line without a text, a tokenizer without the token, a build
            of the same name with other arguments, or another process that runs it.
    """
    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file.")
    if not paths:
        raise DataError(f"{prefix}: no files to build it from.")
    _require_new(os.fspath(prefix))
    eod = tokenizer.eos_token_id
    if append_eod and eod is None:
        raise DataError("append_eod=True: the tokenizer has no eos_token.")
    said = {
        "sources": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths],
        "key": key,
        "end": eod if append_eod else None,
        "special tokens": special_tokens,
        "tokenizer": _facts(tokenizer),
    }
    with _folder(Path(f"{os.fspath(prefix)}.building")) as folder:
        # Another process may have completed the build before the lock was acquired.
        _require_new(os.fspath(prefix))
        if Path(f"{os.fspath(prefix)}.bin").exists():
            # An earlier run was killed between renaming the two files.
            return _ended(folder, said, os.fspath(prefix))
        build = _Build(folder, said, token_dtype(len(tokenizer)))
        encoder = _Encoder(tokenizer, special_tokens=special_tokens)
        try:
            last_progress = build.run(
                iter_texts(paths, key, build.documents), encoder, eod if append_eod else None, say
            )
        finally:
            build.close()
        build.publish(os.fspath(prefix))
    return last_progress


def _require_new(prefix: str) -> None:
    data, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    is_ending = not index.exists() and Path(f"{prefix}.building", "idx").exists()
    for path in (index, data):
        if path.exists() and not is_ending:
            raise DataError(f"{path} already exists; choose another prefix.")


def _facts(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = repr(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """Creates and locks a folder for this process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another process builds it.") from None
        yield folder


def _begun(folder: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Returns the progress of a build after checking that its arguments are the same."""
    before: dict[str, Any] = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    changed = [name for name in said if before["said"].get(name) != said[name]]
    if changed:
        raise DataError(
            f"{folder}: was started with a different {' and '.join(changed)}. Use the same values again, or remove the "
            "folder."
        )
    return before


def _ended(folder: Path, said: dict[str, Any], prefix: str) -> BuildProgress:
    before = _begun(folder, said)
    os.replace(folder / "idx", f"{prefix}.idx")
    shutil.rmtree(folder, ignore_errors=True)
    return BuildProgress(before["documents"], before["tokens"], 0, 0.0, 0)


class _Build:
    """The files of a build, and the sizes up to which they are complete."""

    def __init__(self, folder: Path, said: dict[str, Any], dtype: np.dtype):
        self.folder, self.said, self.dtype = folder, said, dtype
        self.documents = self.tokens = self.sequences = 0
        self._progress = folder / "progress.json"
        if self._progress.exists():
            before = _begun(folder, said)
            self.documents, self.tokens, self.sequences = (
                before[name] for name in ("documents", "tokens", "sequences")
            )
        sizes = {"bin": self.tokens * dtype.itemsize, "lengths": 4 * self.sequences, "ends": 8 * self.documents}
        self._files = {}
        for name, size in sizes.items():
            path = folder / name
            path.touch()
            if path.stat().st_size < size:
                raise DataError(
                    f"{path}: has {path.stat().st_size} bytes, expected at least {size}. Remove the folder."
                )
            # Drop data written after the last progress record.
            os.truncate(path, size)
            self._files[name] = open(path, "ab")  # noqa: SIM115 - closed by close()

    def run(
        self, texts: Iterator[str], encoder: "_Encoder", end: int | None, say: Callable[[BuildProgress], None]
    ) -> BuildProgress:
        began = kept = time.monotonic()
        characters, before = 0, self.tokens
        while batch := list(islice(texts, _BATCH)):
            self._write(encoder(batch), end)
            characters += sum(map(len, batch))
            now = time.monotonic()
            if now - kept > _KEPT_EVERY:
                self._keep()
                kept = now
                say(BuildProgress(self.documents, self.tokens, characters, now - began, self.tokens - before))
        self._keep()
        seconds = time.monotonic() - began
        return BuildProgress(self.documents, self.tokens, characters, seconds, self.tokens - before)

    def _write(self, encoded: Sequence[Sequence[int]], end: int | None) -> None:
        arrays, lengths, ends = [], [], []
        for ids in encoded:
            # A document without tokens has no sequence.
            if len(ids):
                arrays.append(np.asarray(ids, dtype=self.dtype))
                lengths.append(len(ids) + (end is not None))
                if end is not None:
                    arrays.append(np.asarray([end], dtype=self.dtype))
            ends.append(self.sequences + len(lengths))
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, self.dtype)
        self._files["bin"].write(tokens.tobytes())
        self._files["lengths"].write(np.asarray(lengths, dtype="<i4").tobytes())
        self._files["ends"].write(np.asarray(ends, dtype="<i8").tobytes())
        self.tokens, self.sequences = self.tokens + len(tokens), self.sequences + len(lengths)
        self.documents += len(ends)

    def _keep(self) -> None:
        """Flushes the files to disk, then records the progress."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        counts = {"documents": self.documents, "tokens": self.tokens, "sequences": self.sequences, "said": self.said}
        replace_file(self._progress, lambda partial: partial.write_text(json.dumps(counts), encoding="utf-8"))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def publish(self, prefix: str) -> None:
        """Writes the index and renames the pair into place."""
        if not self.sequences:
            raise DataError(f"{prefix}: the texts contain no tokens.")
        lengths = np.fromfile(self.folder / "lengths", dtype="<i4")
        ends = np.concatenate([np.zeros(1, "<i8"), np.fromfile(self.folder / "ends", dtype="<i8")])
        write_index(self.folder / "idx", self.dtype, lengths, ends)
        os.replace(self.folder / "bin", f"{prefix}.bin")
        os.replace(self.folder / "idx", f"{prefix}.idx")
        sync_directory(self.folder.parent)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Encoder:
    """Encodes full texts, ignoring the truncation and padding settings saved with the tokenizer."""

    def __init__(self, tokenizer: Any, *, special_tokens: bool):
        self._tokenizer, self._fast, self._special = tokenizer, None, special_tokens
        if tokenizer.is_fast:
            # Call the backend directly: the tokenizer's own call also computes offsets.
            self._fast = copy.deepcopy(tokenizer.backend_tokenizer)
            self._fast.no_truncation()
            self._fast.no_padding()
            enlarge_word_cache(self._fast, _WORDS)

    def __call__(self, texts: list[str]) -> list[Any]:
        if self._fast is None:
            return list(self._tokenizer(texts, add_special_tokens=self._special).input_ids)
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=self._special)]

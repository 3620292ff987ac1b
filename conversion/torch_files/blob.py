"""Reader of `torch.save` zip archives that are concatenated in a file, as in torch's distributed checkpoints.

Opening reads the directory and the pickle of a blob; tensor bytes are read on demand.
"""

import struct
import zipfile
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.io.random_access_file import DataFile, Window
from ...core.io.safetensors import MOST_TENSORS
from ...core.text import safe_repr
from ...errors import CheckpointError
from .safe_pickle import unpickle
from .torch_save import LARGEST_PICKLE, MEGATRON, OBJECTS, TENSORS, Saved, parse_storage

# Size of a record's header without its name, and of the record that ends a zip file.
_HEADER, _LAST_RECORD = 30, 22
# Flags of a record that is encrypted, or has an encrypted header.
_ENCRYPTED = 1 | 1 << 13
_ENTRY, _ENTRY_SIZE = b"PK\1\2", 46
_BEHIND_ENTRIES = (b"PK\5\6", b"PK\6\6")


class _Archive(Window):
    """A zip file whose directory size is checked before `zipfile` creates millions of entries from it."""

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        if len(data) > LARGEST_PICKLE or data.count(_ENTRY) > MOST_TENSORS:
            raise ValueError(f"its directory has {len(data)} bytes, more than the maximum")
        return data


class Blob(Saved):
    """Content that one `torch.save` wrote to a range of a file.

    Args:
        offset, length: the range; the full file by default.

    Raises:
        CheckpointError: naming the file, if it is damaged, compressed or truncated, or names a class that is not among
            the ones that Megatron and torch save.
    """

    def __init__(self, file: DataFile, offset: int = 0, length: int | None = None):
        self.file, self._start = file, offset
        length = file.size - offset if length is None else length
        file.check(offset, length)
        self.where = f"{file.path}, bytes [{offset}, {offset + length})"
        try:
            with zipfile.ZipFile(_Archive(file, offset, length)) as archive:
                self._end = archive.start_dir
                infos = archive.infolist()
                # No bytes may precede or follow the archive: both would shift the offsets of the directory.
                if file.read(offset, min(length, 4)) != b"PK\3\4" or archive.comment:
                    raise ValueError("bytes before or after the archive")
                # `zipfile` reads the last of several concatenated archives.
                if min((info.header_offset for info in infos), default=0):
                    raise ValueError("it is several concatenated archives")
            if any(file.read(offset + length - _LAST_RECORD + 4, 4)):
                raise ValueError("it is a fragment of a split archive")
            _check_entries(file.read(offset + self._end, length - self._end), len(infos))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeError) as error:
            raise CheckpointError(f"{self.where} is not a torch.save file: {safe_repr(str(error))}") from error
        self._records = {info.filename: info for info in infos}
        pickles = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(self._records) != len(infos) or len(pickles) != 1:
            raise CheckpointError(
                f"{self.where} is not a torch.save file: it has the records {safe_repr(list(self._records))}."
            )
        self._root = pickles[0].removesuffix("data.pkl")
        self._check_directory(infos)
        if f"{self._root}byteorder" in self._records and self._record("byteorder") != b"little":
            raise CheckpointError(f"{self.where} was written on a machine with a different byte order.")
        if f"{self._root}.data/version" not in self._records:
            # torch rejects an archive that has neither version record.
            self._locate("version")
        self.value = unpickle(self._record("data.pkl"), self.where, {**OBJECTS, **TENSORS}, parse_storage, MEGATRON)

    def _check_directory(self, infos: Sequence[zipfile.ZipInfo]) -> None:
        """Checks that every record is uncompressed data inside this file, and that no two overlap."""
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            where = f"{self.where}: record {safe_repr(info.filename)}"
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CheckpointError(f"{where} is compressed.")
            if info.flag_bits & _ENCRYPTED or info.volume:
                raise CheckpointError(f"{where} is encrypted or stored in another file.")
            if info.header_offset < end:
                raise CheckpointError(f"{where} overlaps another one.")
            end = info.header_offset + _HEADER + info.compress_size
            if end > self._end or not info.filename.startswith(self._root):
                raise CheckpointError(f"{where} is outside the archive.")

    def _locate(self, name: str) -> tuple[int, int]:
        """Returns the offset in the file and the size of a record's data."""
        info = self._records.get(self._root + name)
        if info is None:
            raise CheckpointError(f"{self.where}: there is no record {safe_repr(name)}.")
        try:
            header = self.file.read(self._start + info.header_offset, _HEADER)
            named, extra = struct.unpack_from("<HH", header, 26)
            written = self.file.read(self._start + info.header_offset + _HEADER, named)
        except CheckpointError as error:
            raise CheckpointError(f"{self.where}: record {safe_repr(name)} is truncated.") from error
        begin = info.header_offset + _HEADER + named + extra
        if header[:4] != b"PK\3\4" or written != info.filename.encode() or begin + info.file_size > self._end:
            raise CheckpointError(f"{self.where}: record {safe_repr(name)} is not where the directory expects it.")
        return self._start + begin, info.file_size

    def _record(self, name: str) -> bytes:
        begin, size = self._locate(name)
        if size > LARGEST_PICKLE:
            raise CheckpointError(
                f"{self.where}: record {safe_repr(name)} has {size} bytes, more than {LARGEST_PICKLE}."
            )
        content = self.file.read(begin, size)
        self._compare(name, content)
        return content

    def find(self, storage: str) -> tuple[int, int]:
        return self._locate(f"data/{storage}")

    def compare(self, storage: str, content: Tensor) -> None:
        self._compare(f"data/{storage}", content.view(-1).view(torch.uint8).numpy().data)

    def _compare(self, name: str, content: bytes | memoryview) -> None:
        """Compares a record with its checksum, if it has one; torch can omit checksums."""
        expected = self._records[self._root + name].CRC
        if expected and zlib.crc32(content) != expected:
            raise CheckpointError(f"{self.where}: record {safe_repr(name)} does not match its checksum.")


def _check_entries(directory: bytes, count: int) -> None:
    """Checks that the directory ends exactly after its last entry: `zipfile` accepts a truncated one."""
    position = 0
    for _ in range(count):
        # Lengths of the name, of extra fields and of a comment.
        position += _ENTRY_SIZE + sum(struct.unpack_from("<HHH", directory, position + 28))
    if directory[position : position + 4] not in _BEHIND_ENTRIES:
        raise ValueError("its directory does not end after its last entry")

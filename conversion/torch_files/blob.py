"""The zip files of `torch.save` that lie in a file one after another, as torch's distributed checkpoints have them.

Reading looks at the directory and the pickle of a blob, and then at the bytes of a tensor that are asked for.
"""

import struct
import zipfile
import zlib

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files.data_file import DataFile, Window
from .safe_pickle import unpickle
from .saved import LARGEST_PICKLE, MEGATRON, OBJECTS, TENSORS, Saved, storage_of


class Blob(Saved):
    """What one `torch.save` wrote to a part of a file.

    Args:
        offset, length: the part of the file; all of it by default.

    Raises:
        CheckpointError: naming the file, for one that is damaged, compressed or cut off, and for any class it names
            that is not among those that Megatron and torch save.
    """

    def __init__(self, file: DataFile, offset: int = 0, length: int | None = None):
        self.file, self._start = file, offset
        length = file.size - offset if length is None else length
        file.check(offset, length)
        self.where = f"{file.path}, bytes [{offset}, {offset + length})"
        try:
            with zipfile.ZipFile(Window(file, offset, length)) as archive:
                self._end = archive.start_dir
                infos = archive.infolist()
                # Nothing before and nothing behind: both would move what the directory says.
                if file.read(offset, min(length, 4)) != b"PK\3\4" or archive.comment:
                    raise ValueError("it does not begin and end with one")
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, UnicodeError) as error:
            raise CheckpointError(f"{self.where} is no file of torch.save: {error}") from error
        self._records = {info.filename: info for info in infos}
        pickles = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(self._records) != len(infos) or len(pickles) != 1:
            raise CheckpointError(
                f"{self.where} is no file of torch.save: it has the records {list(self._records)[:8]}."
            )
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}byteorder" in self._records and self._record("byteorder") != b"little":
            raise CheckpointError(f"{self.where} was written on a machine of another byte order.")
        if f"{self._root}.data/version" not in self._records:
            # Torch reads no file that has neither.
            self._locate("version")
        self.value = unpickle(self._record("data.pkl"), self.where, {**OBJECTS, **TENSORS}, storage_of, MEGATRON)

    def _locate(self, name: str) -> tuple[int, int]:
        """Finds where the bytes of a record begin in the file, and how many there are."""
        info = self._records.get(self._root + name)
        if info is None:
            raise CheckpointError(f"{self.where}: there is no record {name}.")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(f"{self.where}: record {name} is compressed or encrypted.")
        try:
            header = self.file.read(self._start + info.header_offset, 30)
            named, extra = struct.unpack_from("<HH", header, 26)
            written = self.file.read(self._start + info.header_offset + 30, named)
        except CheckpointError as error:
            raise CheckpointError(f"{self.where}: record {name} is cut off.") from error
        begin = info.header_offset + 30 + named + extra
        if header[:4] != b"PK\3\4" or written != info.filename.encode() or begin + info.file_size > self._end:
            raise CheckpointError(f"{self.where}: record {name} is not where the directory says.")
        return self._start + begin, info.file_size

    def _record(self, name: str) -> bytes:
        begin, size = self._locate(name)
        if size > LARGEST_PICKLE:
            raise CheckpointError(f"{self.where}: record {name} has {size} bytes, more than {LARGEST_PICKLE}.")
        return self.file.read(begin, size)

    def find(self, storage: str) -> tuple[int, int]:
        return self._locate(f"data/{storage}")

    def compare(self, storage: str, whole: Tensor) -> None:
        # Torch can leave checksums out.
        name = f"data/{storage}"
        expected = self._records[self._root + name].CRC
        if expected and zlib.crc32(whole.view(-1).view(torch.uint8).numpy().data) != expected:
            raise CheckpointError(f"{self.where}: record {name} has another checksum than it was written with.")

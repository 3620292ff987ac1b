"""Tests of torch.save archives inside other files: writing, partial reads and rejection of hostile archives."""

import io
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from hf_megatron.conversion.torch_files import blob as blob_module
from hf_megatron.conversion.torch_files.archive_writer import write_object, write_tensor
from hf_megatron.conversion.torch_files.blob import Blob
from hf_megatron.conversion.torch_files.torch_save import LARGEST_PICKLE, StoredTensor
from hf_megatron.conversion.torch_files.weight_file import read_saved
from hf_megatron.core.io.checksums import NewFile
from hf_megatron.core.io.random_access_file import DataFile
from tests.helpers.torch_stores import assert_rejected, make_tensor

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blobs_match_torch_save(tmp_path, dtype):
    tensors = [make_tensor(shape, dtype) for shape in ((), (0,), (5,), (3, 4), (2, 3, 4, 5), (0, 7))]
    tensors += [make_tensor((4, 6), dtype).t(), make_tensor((8, 4), dtype)[2:5, 1:3]]
    file = NewFile(tmp_path / "blobs")
    file.write(b"before")
    locations = [write_tensor(file, tensor) for tensor in tensors] + [write_object(file, [None])]
    file.close()
    data = (tmp_path / "blobs").read_bytes()
    with DataFile(tmp_path / "blobs") as opened:
        assert Blob(opened, *locations.pop()).value == [None]
        for tensor, (offset, length) in zip(tensors, locations, strict=True):
            blob_bytes = data[offset : offset + length]
            loaded = torch.load(io.BytesIO(blob_bytes), weights_only=True)
            assert loaded.dtype == dtype
            assert torch.equal(loaded, tensor)
            # Tensor data is written without a checksum.
            assert zipfile.ZipFile(io.BytesIO(blob_bytes)).testzip() in ("archive/data/0", None)
            blob = Blob(opened, offset, length)
            assert torch.equal(blob.read(blob.tensor()), tensor)


def test_read_boxes_from_any_view(tmp_path):
    base = make_tensor((6, 8, 10))
    views = [
        base,
        base.transpose(0, 2),
        base[1:5, ::2, 3:],
        base.permute(1, 2, 0),
        base[:1].expand(6, 8, 10),
    ]
    for view in views:
        with open(tmp_path / "view", "wb") as file:
            torch.save(view, file)
        starts = [1 if length > 3 else 0 for length in view.shape]
        lengths = [length - 2 if length > 3 else length for length in view.shape]
        box = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
        with DataFile(tmp_path / "view") as file:
            blob = Blob(file)
            out = torch.empty(lengths)
            blob.read_into(blob.tensor(), starts, out)
            assert torch.equal(out, view[box])
            # Reads into a view of a larger tensor.
            frame = torch.zeros([length + 1 for length in lengths])
            target = frame[tuple(slice(1, None) for _ in lengths)]
            blob.read_into(blob.tensor(), starts, target)
            assert torch.equal(target, view[box])


def test_megatron_common_file_is_read(tmp_path):
    from argparse import Namespace

    torch.save({"args": Namespace(a=1, dtype=torch.bfloat16), "t": torch.arange(3), "n": [1.5]}, tmp_path / "common.pt")
    contents = read_saved(tmp_path / "common.pt")
    assert contents["args"].state == {"a": 1, "dtype": torch.bfloat16}
    assert isinstance(contents["t"], StoredTensor)


def test_float8_is_read(tmp_path):
    tensor = make_tensor((4, 4)).to(torch.float8_e4m3fn)
    torch.save(tensor, tmp_path / "t")
    with DataFile(tmp_path / "t") as file:
        blob = Blob(file)
        assert torch.equal(blob.read(blob.tensor()).view(torch.uint8), tensor.view(torch.uint8))


def rezip(source: Path, target: Path, compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for info in old.infolist():
            content = replaced.get(Path(info.filename).name.replace(".", "_"), old.read(info))
            new.writestr(info.filename, content)


def read_blob(path: Path) -> torch.Tensor:
    with DataFile(path) as file:
        blob = Blob(file)
        return blob.read(blob.tensor())


def test_hostile_blobs_are_rejected(tmp_path):
    good, bad, canary = tmp_path / "good", tmp_path / "bad", tmp_path / "canary"
    torch.save(make_tensor((4, 4)), good)

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    rezip(good, bad, data_pkl=pickle.dumps(Bomb(), 2))
    assert_rejected(lambda: read_blob(bad), str(bad), "system")
    rezip(good, bad, zipfile.ZIP_DEFLATED)
    assert_rejected(lambda: read_blob(bad), str(bad), "compressed")
    rezip(good, bad, byteorder=b"big")
    assert_rejected(lambda: read_blob(bad), "byte order")
    with zipfile.ZipFile(good) as archive:
        pickled = archive.read("good/data.pkl") if "good/data.pkl" in archive.namelist() else None
        pickled = pickled or archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    sixteen, four = b"K\x10", b"K\x04K\x04\x86"
    assert pickled.count(sixteen) == 1
    # Storage size, shape and strides exceed the stored data.
    rezip(good, bad, data_pkl=pickled.replace(sixteen, b"J\xff\xff\xff\x7f"))
    assert_rejected(lambda: read_blob(bad), str(bad), "64 bytes")
    for shape in (
        b"K\x04K\x05\x86",
        b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86",
        b"J\xff\xff\xff\xffK\x04\x86",
        b"NK\x04\x86",
    ):
        rezip(good, bad, data_pkl=pickled.replace(four, shape, 1))
        assert_rejected(lambda: read_blob(bad), str(bad), "damaged")
    rezip(good, bad, data_pkl=pickled.replace(b"K\x04K\x01\x86", b"K\x00K\x00\x86"))
    assert read_blob(bad).shape == (4, 4)
    # An expanded shape with zero strides would allocate memory for copies of one entry.
    huge = pickled.replace(four, b"J\x00\x00\x00\x40J\x00\x00\x00\x40\x86", 1).replace(
        b"K\x04K\x01\x86", b"K\x00K\x00\x86"
    )
    rezip(good, bad, data_pkl=huge)
    assert_rejected(lambda: read_blob(bad), "expanded view")
    data = good.read_bytes()
    for end in range(0, len(data), 7):
        bad.write_bytes(data[:end])
        assert_rejected(lambda: read_blob(bad), str(bad))
    # Wrong sizes and offsets in the central directory.
    start = data.index(b"PK\1\2")
    for field in (24, 42):
        for value in (1, 1000, 0x7FFFFFFF):
            changed = bytearray(data)
            entry = next(
                position
                for position in range(start, len(data))
                if data[position : position + 4] == b"PK\1\2" and b"/data/0" in data[position : position + 64]
            )
            struct.pack_into("<I", changed, entry + field, value)
            bad.write_bytes(changed)
            assert_rejected(lambda: read_blob(bad), str(bad))
    bad.unlink()
    os.mkfifo(bad)
    assert_rejected(lambda: read_blob(bad), "not a regular file")
    assert not canary.exists()


def read_directory_offsets(path: Path) -> dict[str, int]:
    """Returns the offset of each record's entry in the central directory."""
    with zipfile.ZipFile(path) as archive:
        position, offsets = archive.start_dir, {}
        for info in archive.infolist():
            offsets[info.filename.partition("/")[2]] = position
            position += 46 + len(info.orig_filename) + len(info.extra) + len(info.comment)
        return offsets


def write_patched_copy(source: Path, target: Path, changes: dict[int, bytes]) -> None:
    content = bytearray(source.read_bytes())
    for offset, value in changes.items():
        content[offset : offset + len(value)] = value
    target.write_bytes(content)


def test_overlapping_records_are_rejected(tmp_path):
    """Each record contains all following ones, so that a 1 MB file could declare 1 GB."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    torch.save({"a": torch.zeros(64), "b": torch.zeros(64)}, good)
    offsets = read_directory_offsets(good)
    content = good.read_bytes()
    first, second = (struct.unpack_from("<I", content, offsets[name] + 42)[0] for name in ("data/0", "data/1"))
    long = struct.pack("<II", second - first + 64, second - first + 64)
    write_patched_copy(good, bad, {offsets["data/0"] + 20: long})
    assert_rejected(lambda: read_saved(bad), str(bad), "overlaps another one")
    write_patched_copy(good, bad, {offsets["data/0"] + 42: struct.pack("<I", second)})
    assert_rejected(lambda: read_saved(bad), str(bad), "overlaps another one")


def test_tensors_larger_than_their_storage_are_rejected(tmp_path):
    """The record size is checked before memory is allocated for the size in the pickle."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    torch.save(make_tensor((4, 4)), good)
    with zipfile.ZipFile(good) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    for length in (1 << 24, 1 << 50, 1 << 4000):
        storage_size, row_count = (
            b"\x8b" + struct.pack("<I", 502) + value.to_bytes(502, "little") for value in (length * 4, length)
        )
        oversized = pickled.replace(b"K\x10", storage_size).replace(b"K\x04K\x04\x86", row_count + b"K\x04\x86", 1)
        rezip(good, bad, data_pkl=oversized)
        assert_rejected(lambda: read_blob(bad), str(bad), "a storage has 64 bytes, expected")


def test_compressed_records_are_not_unpacked(tmp_path):
    bad = tmp_path / "bad"
    with zipfile.ZipFile(bad, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (("data.pkl", bytes(LARGEST_PICKLE + 1)), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    assert bad.stat().st_size < 1 << 20
    assert_rejected(lambda: read_saved(bad), str(bad), "compressed")


def test_directory_with_too_many_records_is_rejected(tmp_path, monkeypatch):
    good = tmp_path / "good"
    torch.save([torch.zeros(1) for _ in range(30)], good)
    assert len(read_saved(good)) == 30
    monkeypatch.setattr(blob_module, "MOST_TENSORS", 20)
    assert_rejected(lambda: read_saved(good), str(good), "its directory has")


def test_checksum_mismatch_is_rejected(tmp_path):
    """A flipped bit in a pickle can yield another valid tensor, name or shape."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    torch.save({"first": torch.zeros(3), "second": torch.ones(3)}, good)
    offset = good.read_bytes().index(b"first")
    write_patched_copy(good, bad, {offset: b"f1rst"})
    assert_rejected(lambda: read_saved(bad), str(bad), "data.pkl does not match its checksum")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"first": torch.zeros(3)}, good)
    finally:
        torch.serialization.set_crc32_options(True)
    write_patched_copy(good, bad, {good.read_bytes().index(b"first"): b"f1rst"})
    assert list(read_saved(bad)) == ["f1rst"]


def test_split_archives_and_bad_entries_are_rejected(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    torch.save(make_tensor((4, 4)), good)
    for offset in (4, 6):
        write_patched_copy(good, bad, {good.stat().st_size - 22 + offset: b"\1"})
        assert_rejected(lambda: read_saved(bad), str(bad), "is a fragment of a split archive")
    # The name of the last entry is longer than the directory.
    write_patched_copy(good, bad, {max(read_directory_offsets(good).values()) + 28: b"\xff"})
    assert_rejected(lambda: read_saved(bad), str(bad), "does not end after its last entry")
    # Fields of a single directory entry: offset, flags and disk number.
    offset = read_directory_offsets(good)["version"]
    write_patched_copy(good, bad, {offset + 45: b"\x40"})
    assert_rejected(lambda: read_saved(bad), str(bad), "version is outside the archive")
    write_patched_copy(good, bad, {offset + 46: b"A"})
    assert_rejected(lambda: read_saved(bad), str(bad), "is outside the archive")
    for offset, value in ((8, b"\1"), (9, b"\x20"), (34, b"\1")):
        write_patched_copy(good, bad, {read_directory_offsets(good)["data/0"] + offset: value})
        assert_rejected(lambda: read_saved(bad), str(bad), "data/0 is encrypted or stored in another file")


def test_concatenated_archives_are_rejected(tmp_path):
    """Of two concatenated archives, torch reads the first and `zipfile` the last."""
    archives = []
    for value in (1.0, 2.0):
        buffer = io.BytesIO()
        torch.save(torch.full((4,), value), buffer)
        archives.append(buffer.getvalue())
    bad = tmp_path / "both"
    bad.write_bytes(b"".join(archives))
    # Python 3.14's `zipfile` rejects such a file itself.
    reason = "it is several concatenated" if sys.version_info < (3, 14) else "is not a torch.save file: "
    assert_rejected(lambda: read_saved(bad), str(bad), reason)

"""Zip files of torch.save inside of other files: written as torch does, read in part, and refused when hostile."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from hf_megatron.conversion.torch_files.blob import Blob
from hf_megatron.conversion.torch_files.reader import read_saved
from hf_megatron.conversion.torch_files.saved import StoredTensor
from hf_megatron.conversion.torch_files.writer import write_object, write_tensor
from hf_megatron.files.data_file import DataFile
from hf_megatron.files.digest import NewFile
from tests.unit.torch_stores import refused, some

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blobs_are_those_of_torch_save(tmp_path, dtype):
    tensors = [some(shape, dtype) for shape in ((), (0,), (5,), (3, 4), (2, 3, 4, 5), (0, 7))]
    tensors += [some((4, 6), dtype).t(), some((8, 4), dtype)[2:5, 1:3]]
    file = NewFile(tmp_path / "blobs")
    file.write(b"before")
    places = [write_tensor(file, tensor) for tensor in tensors] + [write_object(file, [None])]
    file.close()
    data = (tmp_path / "blobs").read_bytes()
    with DataFile(tmp_path / "blobs") as opened:
        assert Blob(opened, *places.pop()).value == [None]
        for tensor, (offset, length) in zip(tensors, places, strict=True):
            own = data[offset : offset + length]
            loaded = torch.load(io.BytesIO(own), weights_only=True)
            assert loaded.dtype == dtype
            assert torch.equal(loaded, tensor)
            # The data has no checksum.
            assert zipfile.ZipFile(io.BytesIO(own)).testzip() in ("archive/data/0", None)
            blob = Blob(opened, offset, length)
            assert torch.equal(blob.read(blob.tensor()), tensor)


def test_boxes_of_any_view(tmp_path):
    whole = some((6, 8, 10))
    views = [whole, whole.transpose(0, 2), whole[1:5, ::2, 3:], whole.permute(1, 2, 0), whole[:1].expand(6, 8, 10)]
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
            # Into a part of something larger.
            frame = torch.zeros([length + 1 for length in lengths])
            target = frame[tuple(slice(1, None) for _ in lengths)]
            blob.read_into(blob.tensor(), starts, target)
            assert torch.equal(target, view[box])


def test_what_megatron_saves_beside_tensors(tmp_path):
    from argparse import Namespace

    torch.save({"args": Namespace(a=1, dtype=torch.bfloat16), "t": torch.arange(3), "n": [1.5]}, tmp_path / "common.pt")
    found = read_saved(tmp_path / "common.pt")
    assert found["args"].state == {"a": 1, "dtype": torch.bfloat16}
    assert isinstance(found["t"], StoredTensor)


def test_float8_is_read(tmp_path):
    tensor = some((4, 4)).to(torch.float8_e4m3fn)
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


def test_hostile_blobs(tmp_path):
    good, bad, canary = tmp_path / "good", tmp_path / "bad", tmp_path / "canary"
    torch.save(some((4, 4)), good)

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    rezip(good, bad, data_pkl=pickle.dumps(Bomb(), 2))
    refused(lambda: read_blob(bad), str(bad), "system")
    rezip(good, bad, zipfile.ZIP_DEFLATED)
    refused(lambda: read_blob(bad), str(bad), "compressed")
    rezip(good, bad, byteorder=b"big")
    refused(lambda: read_blob(bad), "byte order")
    with zipfile.ZipFile(good) as archive:
        pickled = archive.read("good/data.pkl") if "good/data.pkl" in archive.namelist() else None
        pickled = pickled or archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    sixteen, four = b"K\x10", b"K\x04K\x04\x86"
    assert pickled.count(sixteen) == 1
    # A storage, a shape and strides that claim more than there is.
    rezip(good, bad, data_pkl=pickled.replace(sixteen, b"J\xff\xff\xff\x7f"))
    refused(lambda: read_blob(bad), str(bad), "64 bytes")
    for shape in (
        b"K\x04K\x05\x86",
        b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86",
        b"J\xff\xff\xff\xffK\x04\x86",
        b"NK\x04\x86",
    ):
        rezip(good, bad, data_pkl=pickled.replace(four, shape, 1))
        refused(lambda: read_blob(bad), str(bad), "damaged")
    rezip(good, bad, data_pkl=pickled.replace(b"K\x04K\x01\x86", b"K\x00K\x00\x86"))
    assert read_blob(bad).shape == (4, 4)
    # A shape of which every entry is the same one is not worth the memory it claims.
    huge = pickled.replace(four, b"J\x00\x00\x00\x40J\x00\x00\x00\x40\x86", 1).replace(
        b"K\x04K\x01\x86", b"K\x00K\x00\x86"
    )
    rezip(good, bad, data_pkl=huge)
    refused(lambda: read_blob(bad), "repeat")
    data = good.read_bytes()
    for end in range(0, len(data), 7):
        bad.write_bytes(data[:end])
        refused(lambda: read_blob(bad), str(bad))
    # The directory leads elsewhere: a wrong size, a wrong place.
    start = data.index(b"PK\1\2")
    for field in (24, 42):
        for value in (1, 1000, 0x7FFFFFFF):
            changed = bytearray(data)
            entry = next(
                place
                for place in range(start, len(data))
                if data[place : place + 4] == b"PK\1\2" and b"/data/0" in data[place : place + 64]
            )
            struct.pack_into("<I", changed, entry + field, value)
            bad.write_bytes(changed)
            refused(lambda: read_blob(bad), str(bad))
    bad.unlink()
    os.mkfifo(bad)
    refused(lambda: read_blob(bad), "not a regular file")
    assert not canary.exists()

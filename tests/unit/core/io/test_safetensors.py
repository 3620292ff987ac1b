"""Tests of the safetensors writer and readers against the safetensors package, and of rejected files."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_megatron import CheckpointError
from hf_megatron.core.io.checksums import FileDigest, NewFile, hash_file
from hf_megatron.core.io.safetensors import (
    DTYPES,
    MappedSafetensors,
    SafetensorsFile,
    SafetensorsWriter,
    TensorMeta,
    read_header,
    widest_first,
)


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    by_dtype = {str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES}
    return {
        **by_dtype,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "columns": torch.arange(12.0).view(3, 4).T,
    }


def write_file(path, content, names, hashed=True):
    file = NewFile(path, hashed)
    writer = SafetensorsWriter(file, widest_first({name: TensorMeta.of(tensor) for name, tensor in content.items()}))
    for name in names:
        writer.write(name, content[name])
    writer.finish()
    file.close()
    return file


@pytest.mark.parametrize("hashed", [True, False])
def test_written_file_loads_with_all_readers(hashed, tmp_path):
    content = make_tensors()
    ordered = list(widest_first({name: TensorMeta.of(tensor) for name, tensor in content.items()}))
    file = write_file(tmp_path / "a.safetensors", content, ordered if hashed else reversed(ordered), hashed)
    loaded = load_file(tmp_path / "a.safetensors")
    reader, mapped = SafetensorsFile(tmp_path / "a.safetensors"), MappedSafetensors(tmp_path / "a.safetensors")
    assert loaded.keys() == content.keys() == reader.locations.keys()
    for name, tensor in content.items():
        for other in (loaded[name], reader.read(name), mapped.tensor(name).view(tensor.shape)):
            assert other.dtype == tensor.dtype and torch.equal(other.float(), tensor.float())
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    if hashed:
        assert file.digest == hash_file(tmp_path / "a.safetensors")
    for name, location in read_header(tmp_path / "a.safetensors").items():
        assert location.start % content[name].element_size() == 0, name


def test_bytes_do_not_depend_on_write_order(tmp_path):
    content = make_tensors()
    ordered = list(widest_first({name: TensorMeta.of(tensor) for name, tensor in content.items()}))
    write_file(tmp_path / "a", content, ordered)
    write_file(tmp_path / "b", content, sorted(ordered), hashed=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_unplanned_tensors_are_rejected(tmp_path):
    content = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}
    meta = {name: TensorMeta.of(tensor) for name, tensor in content.items()}
    writer = SafetensorsWriter(NewFile(tmp_path / "x"), meta)
    writer.write("a", content["a"])
    for name, tensor, message in (
        ("a", content["a"], "expected None"),
        ("z", content["a"], "expected None"),
        ("b", torch.ones(2), "b (2,)"),
        ("c", content["c"], "expected offset"),
    ):
        with pytest.raises(CheckpointError) as caught:
            writer.write(name, tensor)
        assert message in str(caught.value)
    with pytest.raises(CheckpointError, match="never written"):
        SafetensorsWriter(NewFile(tmp_path / "y"), meta).finish()
    with pytest.raises(CheckpointError, match="complex64 cannot be stored"):
        SafetensorsWriter(NewFile(tmp_path / "z"), {"a": TensorMeta((1,), torch.complex64)})


def test_digest_matches_written_bytes(tmp_path):
    file = NewFile(tmp_path / "x")
    file.write(b"abc")
    file.write_tensor(torch.arange(100_000))
    file.close()
    assert file.digest == hash_file(tmp_path / "x") and isinstance(file.digest, FileDigest)
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1] + b"!")
    assert file.digest != hash_file(tmp_path / "x")


@pytest.mark.parametrize("by", [-1, 1, 8])
def test_wrong_header_length_is_rejected(by, tmp_path):
    path = tmp_path / "a.safetensors"
    content = {"a": torch.arange(6.0), "b": torch.arange(4.0)}
    write_file(path, content, list(content))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * (length - len(data[8 : 8 + length].rstrip()))
    path.write_bytes((length + by).to_bytes(8, "little") + header + b" " * max(by, 0) + data[8 + length + max(by, 0) :])
    with pytest.raises(CheckpointError, match="does not cover the file exactly|not JSON|in a file of"):
        read_header(path)


# No tensor owns the four bytes between them.
DATA_OFFSETS = {"a": [0, 4], "b": [8, 12]}


def test_gap_between_tensors_is_rejected(tmp_path):
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": offsets} for name, offsets in DATA_OFFSETS.items()}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(CheckpointError, match="does not cover the file exactly"):
        read_header(tmp_path / "a.safetensors")

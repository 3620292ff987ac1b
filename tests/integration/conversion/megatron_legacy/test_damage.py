"""Tests of damaged and malicious legacy Megatron files: rejected by name, without running any code."""

import os
import pickle
import re
import struct
import zipfile

import pytest
import torch

from hf_megatron.errors import CheckpointError
from tests.helpers.legacy_weights import (
    FIRST,
    check_equal,
    edit_rank_file,
    make_weights,
    model,
    read_checkpoint,
    set_value,
    write_checkpoint,
)


@pytest.fixture
def tensors():
    return make_weights()


class Bomb:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["args", "model", "rng_state", "extra_state"])
@pytest.mark.parametrize("function", [os.system, eval, exec], ids=lambda function: function.__name__)
def test_pickle_code_does_not_run(tmp_path, tensors, function, place):
    marker = tmp_path / "ran"
    command = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w').close()"
    write_checkpoint(tmp_path / "out", tensors, model())
    path = ["model", "output_layer._extra_state"] if place == "extra_state" else [place]
    edit_rank_file(tmp_path / "out" / FIRST, set_value(path, Bomb(function, command)))
    with pytest.raises(CheckpointError, match=f"references .*{function.__name__}") as caught:
        read_checkpoint(tmp_path / "out", model())
    assert str(tmp_path / "out" / FIRST) in str(caught.value)
    assert not marker.exists()


def test_old_torch_files_are_read_and_pickles_rejected(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model())
    path = tmp_path / "out" / FIRST
    content = torch.load(path, weights_only=False)
    expected = read_checkpoint(tmp_path / "out", model())
    torch.save(content, path, _use_new_zipfile_serialization=False)
    restored = read_checkpoint(tmp_path / "out", model())
    assert restored.keys() == expected.keys() and all(torch.equal(restored[key], expected[key]) for key in expected)
    path.write_bytes(pickle.dumps(Bomb(os.system, f"touch {tmp_path / 'ran'}")))
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_checkpoint(tmp_path / "out", model())
    assert not (tmp_path / "ran").exists()


def test_truncated_file_is_rejected(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model())
    path = tmp_path / "out" / FIRST
    content = path.read_bytes()
    for length in (0, 10, 100, len(content) // 2, len(content) - 1000, len(content) - 20, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_checkpoint(tmp_path / "out", model())


def test_flipped_zip_directory_byte_is_rejected_or_harmless(tmp_path):
    expected = make_weights(layers=1, experts=0)
    megatron_model = model(layers=1)
    write_checkpoint(tmp_path / "out", expected, megatron_model)
    path = tmp_path / "out" / FIRST
    content = path.read_bytes()
    start = struct.unpack("<I", content[-6:-2])[0]
    refused = 0
    for position in range(start, len(content), 2):
        for bit in (0x01, 0x80):
            damaged = bytearray(content)
            damaged[position] ^= bit
            path.write_bytes(damaged)
            try:
                restored = read_checkpoint(tmp_path / "out", megatron_model)
            except CheckpointError as error:
                assert str(path) in str(error)
                refused += 1
            else:
                check_equal(restored, expected)
    assert refused > (len(content) - start) / 4


def test_flipped_pickle_byte_raises_only_checkpoint_error(tmp_path):
    megatron_model = model(layers=1)
    write_checkpoint(tmp_path / "out", make_weights(layers=1, experts=0), megatron_model)
    path = tmp_path / "out" / FIRST
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo("archive/data.pkl").file_size
    rejected = 0
    for position in range(64, 64 + size, 3):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            read_checkpoint(tmp_path / "out", megatron_model)
        except CheckpointError as error:
            assert str(tmp_path) in str(error)
            rejected += 1
    # A flipped byte inside of an argument that is not read changes nothing.
    assert rejected > size / 3 / 4


def test_record_names_cannot_escape_folder(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model())
    path = tmp_path / "out" / FIRST
    content = path.read_bytes()
    for name in (b"archive/data/1", b"archive/data.pkl"):
        evil = (b"../../../" * 3)[: len(name)]
        path.write_bytes(content.replace(name, evil))
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_checkpoint(tmp_path / "out", model())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]

"""Tests of Megatron's indexed datasets: reading, byte-identical writing and detection of damage."""

import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from hf_megatron.datasets import indexed_writer
from hf_megatron.datasets.indexed import IndexedDataset, token_dtype
from hf_megatron.datasets.indexed_writer import IndexedWriter, merge_datasets
from hf_megatron.errors import DataError

DATA = Path(__file__).parents[2] / "data" / "megatron_indexed"
INPUTS, TARGETS = DATA / "ag_news_prompt_inputs_document", DATA / "ag_news_prompt_targets_document"


def _list_documents(dataset):
    return [
        [dataset[index] for index in range(start, stop)]
        for start, stop in zip(dataset.documents, dataset.documents[1:], strict=False)
    ]


def _write_pair(prefix, documents, dtype="int32", **options):
    with IndexedWriter(prefix, dtype, **options) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.mark.parametrize("prefix", [INPUTS, TARGETS], ids=["inputs", "targets"])
def test_megatron_pair_round_trips(prefix, tmp_path):
    dataset = IndexedDataset(prefix)
    summary = dataset.verify(vocab_size=250_880)
    assert (summary["sequences"], summary["documents"], str(dataset.dtype)) == (100, 100, "int32")
    assert summary["tokens"] == sum(map(len, dataset)) == dataset.tokens
    _write_pair(tmp_path / "copy", _list_documents(dataset))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"copy.{ending}").read_bytes() == Path(f"{prefix}.{ending}").read_bytes()
    with pytest.raises(DataError, match="the vocabulary size is 100"):
        dataset.verify(vocab_size=100)


def test_merge_datasets(tmp_path):
    merge_datasets(tmp_path / "both", [INPUTS, TARGETS])
    both, first, second = IndexedDataset(tmp_path / "both"), IndexedDataset(INPUTS), IndexedDataset(TARGETS)
    assert both.verify()["tokens"] == first.tokens + second.tokens
    assert len(both) == 200 and list(both.documents) == list(range(201))
    assert np.array_equal(both[100], second[0]) and np.array_equal(both[199], second[99])
    _write_pair(tmp_path / "one", [*_list_documents(first), *_list_documents(second)])
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "both.idx").read_bytes()
    _write_pair(tmp_path / "small", [[[1, 2]]], "uint16")
    with pytest.raises(DataError, match="small: has dtype uint16"):
        merge_datasets(tmp_path / "mixed", [INPUTS, tmp_path / "small"])
    assert not list(tmp_path.glob("mixed*"))
    with pytest.raises(DataError, match="already exists"):
        merge_datasets(tmp_path / "both", [INPUTS])


def test_partial_reads_and_multi_sequence_documents(tmp_path):
    documents = [[[1, 2, 3], [4]], [[]], [[5, 6]], []]
    _write_pair(tmp_path / "few", documents, "uint16")
    dataset = IndexedDataset(tmp_path / "few")
    assert list(map(list, dataset)) == [[1, 2, 3], [4], [], [5, 6]]
    assert list(dataset.documents) == [0, 2, 3, 4, 4]
    assert list(dataset.read(0, 1, 2)) == [2, 3] and list(dataset.read(0, 3, 0)) == []
    assert dataset.verify()["empty sequences"] == 1
    with pytest.raises(IndexError, match="tokens 2 to 4 of sequence 0, which has 3"):
        dataset.read(0, 2, 2)
    unpickled = pickle.loads(pickle.dumps(dataset))
    assert list(unpickled[3]) == [5, 6] and len(pickle.dumps(dataset)) < 500


def test_modes(tmp_path):
    with IndexedWriter(tmp_path / "modes", "int32", multimodal=True) as writer:
        writer.add_document([[1, 2], [3]], modes=[0, 1])
        writer.add_document([[4]], modes=[1])
    assert list(IndexedDataset(tmp_path / "modes", multimodal=True).modes) == [0, 1, 1]
    with pytest.raises(DataError, match="has a mode for each sequence: pass multimodal=True"):
        IndexedDataset(tmp_path / "modes")
    with pytest.raises(DataError, match="has no mode for each sequence: pass multimodal=False"):
        IndexedDataset(INPUTS, multimodal=True)
    with (
        pytest.raises(DataError, match="got modes None"),
        IndexedWriter(tmp_path / "x", "int32", multimodal=True) as writer,
    ):
        writer.add_document([[1]])
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float32", "float64", "uint16"])
def test_all_dtypes(tmp_path, dtype):
    _write_pair(tmp_path / "one", [[[1, 2, 100]]], dtype)
    dataset = IndexedDataset(tmp_path / "one")
    assert dataset.dtype == dtype and list(dataset[0]) == [1, 2, 100]


def test_token_dtype_by_vocabulary_size(tmp_path):
    assert [str(token_dtype(size)) for size in (65_499, 65_500, 65_537, None)] == ["uint16", "int32", "int32", "int32"]
    with pytest.raises(DataError, match="token 65536 does not fit into uint16"):
        _write_pair(tmp_path / "large", [[[1, 65_536]]], "uint16")
    with pytest.raises(DataError, match="dtype=complex64"):
        IndexedWriter(tmp_path / "large", "complex64")
    assert not list(tmp_path.iterdir())


def test_failed_writes_leave_no_files(tmp_path):
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "ended", "int32") as writer:
        writer.add_document([[1, 2]])
        _ = 1 / 0
    with pytest.raises(DataError, match="nothing was written"), IndexedWriter(tmp_path / "empty", "int32"):
        pass
    assert not list(tmp_path.iterdir())
    _write_pair(tmp_path / "kept", [[[1]]])
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "kept", "int32", overwrite=True) as writer:
        writer.add_document([[2]])
        _ = 1 / 0
    assert list(IndexedDataset(tmp_path / "kept")[0]) == [1]
    _write_pair(tmp_path / "kept", [[[2]]], overwrite=True)
    assert list(IndexedDataset(tmp_path / "kept")[0]) == [2]


def _truncate_file(path, size):
    path.write_bytes(path.read_bytes()[:size])


def _patch_file(path, place, form, value):
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, place, value)
    path.write_bytes(content)


DAMAGE = {
    "short data": (lambda idx, data: _truncate_file(data, 23_700), "truncated or from another pair"),
    "empty data": (lambda idx, data: _truncate_file(data, 0), "truncated or from another pair"),
    "short index": (
        lambda idx, data: _truncate_file(idx, 2_000),
        "has 2000 bytes, but its header declares 100 sequences",
    ),
    "short header": (lambda idx, data: _truncate_file(idx, 20), "is not a Megatron index"),
    "empty index": (lambda idx, data: _truncate_file(idx, 0), "is not a Megatron index"),
    "another's index": (
        lambda idx, data: shutil.copyfile(f"{TARGETS}.idx", idx),
        "truncated or from another pair",
    ),
    "another format": (lambda idx, data: idx.write_bytes(b"TNTIDX\x00\x00" + bytes(100)), "fairseq's old format"),
    "another version": (lambda idx, data: _patch_file(idx, 9, "<Q", 2), "format version 2"),
    "unknown type": (lambda idx, data: _patch_file(idx, 17, "<B", 9), "unknown dtype code 9"),
    "no sequence": (lambda idx, data: _patch_file(idx, 18, "<Q", 0), "has 0 sequences"),
    "more sequences": (lambda idx, data: _patch_file(idx, 18, "<Q", 2**60), "sequences and 101 document entries"),
    "wrong end": (
        lambda idx, data: _patch_file(idx, 34 + 12 * 100 + 8 * 100, "<q", 99),
        "sequences 0 to 99, expected 0 to 100",
    ),
    "no data": (lambda idx, data: data.unlink(), "no such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_reported_on_open(tmp_path, damage):
    for ending in ("bin", "idx"):
        shutil.copyfile(f"{INPUTS}.{ending}", tmp_path / f"pair.{ending}")
    spoil, message = DAMAGE[damage]
    spoil(tmp_path / "pair.idx", tmp_path / "pair.bin")
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "pair")


@pytest.mark.parametrize(
    ("place", "form", "value", "message"),
    [
        (34 + 4 * 100 + 8 * 50, "<q", 12, "sequence 50 does not begin where the one before it ends"),
        (34 + 4 * 7, "<i", -1, "sequence 7 has a negative length"),
        (34 + 12 * 100 + 8 * 3, "<q", 90, "document 4 begins before document 3"),
    ],
)
def test_inner_damage_is_reported_by_verify(tmp_path, place, form, value, message):
    for ending in ("bin", "idx"):
        shutil.copyfile(f"{INPUTS}.{ending}", tmp_path / f"pair.{ending}")
    _patch_file(tmp_path / "pair.idx", place, form, value)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "pair").verify()


def test_rejected_document_writes_nothing(tmp_path):
    with IndexedWriter(tmp_path / "pair", "uint16") as writer:
        for document in ([[1, 2], [3]], [[7, 7], [70000]], [5, 6], [[[1, 2]]], [[4, 5]]):
            if document in ([[1, 2], [3]], [[4, 5]]):
                writer.add_document(document)
            else:
                with pytest.raises(DataError, match="token 70000 does not fit into uint16|got . dims"):
                    writer.add_document(document)
    dataset = IndexedDataset(tmp_path / "pair")
    assert [sequence.tolist() for sequence in dataset] == [[1, 2], [3], [4, 5]] and dataset.documents.tolist() == [
        0,
        2,
        3,
    ]
    with IndexedWriter(tmp_path / "modes", "uint16", multimodal=True) as writer:
        with pytest.raises(DataError, match="got modes .* of 1 sequences"):
            writer.add_document([[1]], modes=[0, 1])
        writer.add_document([[1], [2]], modes=np.array([0, 1]))
    assert IndexedDataset(tmp_path / "modes", multimodal=True).modes.tolist() == [0, 1]


def test_failed_overwrite_keeps_the_old_pair(tmp_path, monkeypatch):
    for name in ("old", "broken"):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            writer.add_document([[1, 2, 3]])
            writer.add_document([[4]])
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.glob("old*"))
    content = bytearray((tmp_path / "broken.idx").read_bytes())
    content[34:38] = (100).to_bytes(4, "little")
    (tmp_path / "broken.idx").write_bytes(bytes(content))
    with pytest.raises(DataError, match="broken.idx: sequence 1 does not begin where the one before it ends"):
        merge_datasets(tmp_path / "old", [tmp_path / "broken"], overwrite=True)

    def raise_disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(indexed_writer, "write_index", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        merge_datasets(tmp_path / "old", [tmp_path / "old"], overwrite=True)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.glob("old*")) == before
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]

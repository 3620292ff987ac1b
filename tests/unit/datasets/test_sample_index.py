"""Tests of the sample order against golden vectors from Megatron-Core and against the token stream."""

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from hf_megatron.datasets import sample_index as ordering
from hf_megatron.datasets.indexed import IndexedDataset
from hf_megatron.datasets.sample_index import (
    blend_order,
    count_blend_samples,
    exhaustive_order,
    list_split_documents,
    parse_split,
    sample_order,
)
from hf_megatron.errors import DataError

DATA = Path(__file__).parents[2] / "data" / "megatron_indexed"
TRAIN, VALID, TEST = range(3)


def _digest(values):
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def lengths():
    """Lengths of a thousand OpenWebText documents, read from the index file only."""
    content = (DATA / "meg-gpt2-openwebtext_text_document.idx").read_bytes()
    return np.frombuffer(content, dtype="<i4", count=1000, offset=34)


# Split, split index, sequence length, seed, requested samples, options; samples and epochs; digests of the indices.
VECTORS = {
    "train": (
        ("969,30,1", TRAIN, 128, 1234, 5000, {}),
        (10390, 1, "876051b4c0cd5c20", "01da6ca6bc98c859", "a13a384b5a5e7410"),
    ),
    "valid": (
        ("969,30,1", VALID, 128, 1234, 100, {}),
        (243, 1, "12d50e53ff3b12cd", "1c6b6e86a08d3971", "4d3d7952c7428b49"),
    ),
    "test of two epochs": (
        ("969,30,1", TEST, 128, 1234, 10, {}),
        (11, 2, "acaafa2599df7486", "1ef1bb33f5802935", "8d153507e5cde032"),
    ),
    "three epochs, the last apart": (
        ("969,30,1", TRAIN, 128, 1234, 25_000, {}),
        (31170, 3, "77b6a74c37f80a62", "b0c398b12bce682d", "f1cf21ac159c655e"),
    ),
    "three epochs together": (
        ("969,30,1", TRAIN, 128, 1234, 30_500, {}),
        (31170, 3, "10a924283452401b", "c8117e737ce6173c", "b6dc992f14915963"),
    ),
    "no extra token": (
        ("90,5,5", TRAIN, 128, 42, None, {"extra_token": False}),
        (9695, 1, "c2b9b2f9b55b6955", "52c3025d03150c5c", "da30b5a8669173c6"),
    ),
    "a last part": (
        ("90,5,5", VALID, 128, 42, None, {"drop_last_partial": False}),
        (503, 1, "42f72711404a5bde", "1b074b61cf8e9fc5", "382987ec8efa35e3"),
    ),
}


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("block", [1 << 24, 7])
def test_golden_vectors(lengths, name, block, monkeypatch):
    monkeypatch.setattr(ordering, "_BLOCK", block)
    (split, split_index, length, seed, samples, options), expected = VECTORS[name]
    documents = list_split_documents(parse_split(split)[split_index], 1000)
    order = sample_order(lengths, documents, length, samples, seed, **options)
    digests = map(_digest, (order.document_index, order.sample_index, order.shuffle_index))
    assert (len(order), order.epochs, *digests) == expected
    if name == "train":
        assert order.document_index[:4].tolist() == [40, 394, 219, 677]
        assert order.shuffle_index[:4].tolist() == [6106, 8951, 6137, 645]


def test_golden_blends():
    counts, built = count_blend_samples([0.3, 0.7], 200)
    assert (counts, built) == ([60, 140], [61, 141])
    order = blend_order([0.3, 0.7], sum(counts))
    assert (_digest(order.dataset), _digest(order.sample)) == ("7c3b0fd5bba97b22", "4fd38226e3db3581")
    assert order.dataset[:10].tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    for samples, digest in ((1000, "2e28e3a4df089cf7"), (50, "0e5795a39eb103d2"), (5, "7267b3f955378516")):
        counts, _ = count_blend_samples([0.5, 0.3, 0.2], samples)
        order = blend_order([0.5, 0.3, 0.2], sum(counts))
        assert _digest(order.dataset) == digest
    # A blend may have more samples than requested.
    assert len(order) == 6
    sizes = []
    for name in ("inputs", "targets"):
        dataset = IndexedDataset(DATA / f"ag_news_prompt_{name}_document")
        documents = list_split_documents(parse_split("90,10,0")[TRAIN], len(dataset))
        sizes.append(len(sample_order(dataset.lengths, documents, 32, None, 1234)))
    order = exhaustive_order(sizes)
    assert (len(order), _digest(order.dataset), _digest(order.sample)) == (172, "a4018939a6d700b9", "f354d01ac35fe15f")


def _list_plain_tokens(lengths, found):
    """Returns the token indices of the documents in reading order, concatenated."""
    first = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([np.arange(first[one], first[one + 1]) for one in found.document_index])


@pytest.mark.parametrize("seed", range(40))
def test_pieces_match_the_token_stream(seed):
    """Sample `j` consists of tokens `[j L, j L + L + x)` of the stream, for any documents."""
    generator = random.Random(seed)
    lengths = np.array(
        [generator.choice([0, 1, generator.randrange(1, 60)]) for _ in range(generator.randrange(1, 30))], np.int32
    )
    length, extra = generator.randrange(2, 20), generator.random() < 0.5
    if int(lengths.sum()) <= length:
        lengths[0] += 2 * length
    documents = np.arange(len(lengths), dtype=np.int32)
    samples = generator.choice([None, generator.randrange(1, 200)])
    order = sample_order(lengths, documents, length, samples, seed, extra_token=extra)
    stream = _list_plain_tokens(lengths, order)
    first = np.concatenate([[0], np.cumsum(lengths)])
    for index in range(len(order)):
        chunks = []
        for document, start, count in order.pieces(index):
            stop = int(lengths[document]) if count < 0 else start + count
            assert 0 <= start <= stop <= lengths[document]
            chunks.append(np.arange(first[document] + start, first[document] + stop))
        offset = int(order.shuffle_index[index]) * length
        assert np.array_equal(np.concatenate(chunks), stream[offset : offset + length + int(extra)])
    assert sorted(order.shuffle_index.tolist()) == list(range(len(order)))
    if samples is not None:
        assert len(order) >= samples


def test_parse_split():
    assert parse_split("969,30,1") == ((0.0, 0.969), (0.969, 0.999), (0.999, 1.0))
    assert parse_split("1") == ((0.0, 1.0), None, None)
    assert parse_split("90,0,10")[VALID] is None
    assert list_split_documents((0.969, 0.999), 1000).tolist() == list(range(969, 999))
    for wrong in ("", "0,0,0", "1,2,3,4", "all"):
        with pytest.raises(DataError, match="expected one to three weights"):
            parse_split(wrong)


def test_empty_datasets_are_rejected():
    none = np.zeros(3, np.int32)
    with pytest.raises(DataError, match="3 documents contain no tokens"):
        sample_order(none, np.arange(3), 4, None, 0)
    with pytest.raises(DataError, match="4 tokens make no sample of 4 and one more"):
        sample_order(np.array([4], np.int32), np.arange(1), 4, None, 0)
    with pytest.raises(DataError, match="expected 1 or more"):
        sample_order(np.array([4], np.int32), np.arange(1), 0, None, 0)

"""Tests of building Megatron .bin/.idx pairs from texts, against Megatron-LM's output and with killed builds."""

import gzip
import json
import os
import random
import signal
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_megatron.datasets import build as building
from hf_megatron.datasets.build import build_pair
from hf_megatron.datasets.indexed import IndexedDataset
from hf_megatron.datasets.indexed_writer import IndexedWriter
from hf_megatron.errors import DataError

WORDS = [f"w{number}" for number in range(200)]


def make_tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def make_texts(count=300, seed=0):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randrange(0, 12))) for _ in range(count)]


def write_lines(path, texts):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "id": 1}) + "\n" for text in texts)
    return path


def write_like_megatron(prefix, texts, tokenizer, *, append_eod):
    """Writes a pair as `tools/preprocess_data.py` does: one sequence per document, none for an empty one."""
    with IndexedWriter(prefix, "uint16") as writer:
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            writer.add_document([ids + [tokenizer.eos_token_id] * append_eod] if ids else [])


def have_same_files(one, other):
    return all(open(f"{one}.{kind}", "rb").read() == open(f"{other}.{kind}", "rb").read() for kind in ("bin", "idx"))


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "folder", "txt"])
def test_all_file_formats_match_megatron(tmp_path, kind, append_eod):
    tokenizer, texts = make_tokenizer(), make_texts()
    texts_by_file = [texts[:130], texts[130:]]
    if kind == "txt":
        texts_by_file = [[text] for text in texts[:20]]
        texts = texts[:20]
    sources = []
    for index, file_texts in enumerate(texts_by_file):
        path = tmp_path / f"part{index}.{kind}"
        if kind.startswith("jsonl"):
            write_lines(path, file_texts)
        elif kind == "parquet":
            pyarrow.parquet.write_table(
                pyarrow.table({"id": [1] * len(file_texts), "text": file_texts}), path, row_group_size=50
            )
        elif kind == "txt":
            path.write_text(file_texts[0], encoding="utf-8")
        else:
            Dataset.from_dict({"text": file_texts}).save_to_disk(path)
        sources.append(path)
    summary = build_pair(tmp_path / "ours", sources, tokenizer, append_eod=append_eod)
    write_like_megatron(tmp_path / "theirs", texts, tokenizer, append_eod=append_eod)
    assert have_same_files(tmp_path / "ours", tmp_path / "theirs")
    dataset = IndexedDataset(tmp_path / "ours")
    assert (
        (summary.documents, summary.tokens)
        == (len(texts), dataset.tokens)
        == (len(dataset.documents) - 1, summary.tokens)
    )
    assert not (tmp_path / "ours.building").exists()


def test_killed_build_resumes(tmp_path, monkeypatch):
    """Kills the build at five random positions, with data beyond the last recorded position on disk."""
    tokenizer, texts = make_tokenizer(), make_texts(3000)
    sources = [write_lines(tmp_path / "one.jsonl", texts[:1700]), write_lines(tmp_path / "two.jsonl", texts[1700:])]
    write_like_megatron(tmp_path / "whole", texts, tokenizer, append_eod=True)
    monkeypatch.setattr(building, "_BATCH", 100)
    monkeypatch.setattr(building, "_KEPT_EVERY", 0.0)
    original, generator = building._Encoder.__call__, random.Random(0)
    for _ in range(5):
        stop = generator.randrange(2, 7)
        child = os.fork()
        if child == 0:
            calls = []

            def encode_or_kill(*args, calls=calls, stop=stop):
                calls.append(1)
                if len(calls) == stop:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args)

            building._Encoder.__call__ = encode_or_kill
            build_pair(tmp_path / "ours", sources, tokenizer, append_eod=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        # Part of an unrecorded batch reached the disk.
        with open(tmp_path / "ours.building" / "bin", "ab") as file:
            file.write(b"123")
    summary = build_pair(tmp_path / "ours", sources, tokenizer, append_eod=True)
    assert summary.documents == 3000 and summary.new_tokens < summary.tokens
    assert have_same_files(tmp_path / "ours", tmp_path / "whole")


def test_resume_with_different_settings_is_rejected(tmp_path):
    tokenizer = make_tokenizer()
    source = write_lines(tmp_path / "one.jsonl", [*make_texts(), 7])
    with pytest.raises(DataError, match=r"one.jsonl:301: expected a string, got int"):
        build_pair(tmp_path / "ours", [source], tokenizer)
    building_folder = tmp_path / "ours.building"
    (building_folder / "progress.json").write_text(
        json.dumps({"documents": 0, "tokens": 0, "sequences": 0, "said": {"key": "other"}})
    )
    with pytest.raises(
        DataError, match="was started with a different sources and key and special tokens and tokenizer"
    ):
        build_pair(tmp_path / "ours", [source], tokenizer)


def test_saved_truncation_and_padding_are_ignored(tmp_path):
    """Texts are neither truncated nor padded, as when a transformers tokenizer is called."""
    tokenizer, texts = make_tokenizer(), make_texts()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    build_pair(tmp_path / "ours", [write_lines(tmp_path / "one.jsonl", texts)], tokenizer)
    write_like_megatron(tmp_path / "theirs", texts, make_tokenizer(), append_eod=False)
    assert have_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_truncated_gzip_is_rejected(tmp_path, name):
    unsharded = gzip.compress(b'{"text": "w1 w2"}\n' * 2000)
    (tmp_path / name).write_bytes(unsharded[: len(unsharded) // 2])
    with pytest.raises(DataError, match=f"{name}: is not a complete gzip file"):
        build_pair(tmp_path / "ours", [tmp_path / name], make_tokenizer())


def test_special_tokens_around_texts(tmp_path):
    tokenizer, source = make_tokenizer(), write_lines(tmp_path / "one.jsonl", ["w1 w2", "", "w3"])
    begin = tokenizer.convert_tokens_to_ids("w9")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("w9 $A", special_tokens=[("w9", begin)])
    words = tokenizer.convert_tokens_to_ids(["w1", "w2", "w3"])
    for special, around in ((True, [begin]), (False, [])):
        prefix = tmp_path / f"special{special}"
        build_pair(prefix, [source], tokenizer, special_tokens=special)
        sequences = [one.tolist() for one in IndexedDataset(prefix)]
        assert sequences == [around + words[:2], *([around] if special else []), around + words[2:]]
        assert sequences[0] == tokenizer("w1 w2", add_special_tokens=special).input_ids


def test_interrupt_between_bin_and_idx_resumes(tmp_path, monkeypatch):
    tokenizer, source = make_tokenizer(), write_lines(tmp_path / "one.jsonl", make_texts())
    original = os.replace

    def interrupt_replace(one, other):
        if str(other).endswith("ours.idx"):
            raise KeyboardInterrupt
        original(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(building.os, "replace", interrupt_replace)
        with pytest.raises(KeyboardInterrupt):
            build_pair(tmp_path / "ours", [source], tokenizer)
    assert not (tmp_path / "ours.idx").exists()
    other = write_lines(tmp_path / "two.jsonl", make_texts(3))
    with pytest.raises(DataError, match="was started with a different sources"):
        build_pair(tmp_path / "ours", [other], tokenizer)
    assert build_pair(tmp_path / "ours", [source], tokenizer).documents == 300
    write_like_megatron(tmp_path / "theirs", make_texts(), tokenizer, append_eod=False)
    assert have_same_files(tmp_path / "ours", tmp_path / "theirs") and not (tmp_path / "ours.building").exists()


def test_second_concurrent_build_is_rejected(tmp_path):
    tokenizer, source = make_tokenizer(), write_lines(tmp_path / "one.jsonl", make_texts())
    child = os.fork()
    if child == 0:
        original = building._Encoder.__call__
        building._Encoder.__call__ = lambda *args: time.sleep(3) or original(*args)
        build_pair(tmp_path / "ours", [source], tokenizer)
        os._exit(0)
    while not (tmp_path / "ours.building" / "bin").exists():
        time.sleep(0.01)
    with pytest.raises(DataError, match="another process builds it"):
        build_pair(tmp_path / "ours", [source], tokenizer)
    assert os.waitpid(child, 0)[1] == 0
    assert IndexedDataset(tmp_path / "ours").verify(202)["documents"] == 300


def test_full_disk_loses_no_progress(tmp_path, monkeypatch):
    tokenizer, source = make_tokenizer(), write_lines(tmp_path / "one.jsonl", make_texts(1000))
    monkeypatch.setattr(building, "_KEPT_EVERY", 0.0)
    calls = []

    def raise_disk_full(self):
        calls.append(1)
        if len(calls) == 3:
            # Part of the written data has reached the disk.
            self._files["lengths"].flush()
            raise OSError(28, "No space left on device")
        return original(self)

    original = building._Build._keep
    with monkeypatch.context() as patch:
        patch.setattr(building._Build, "_keep", raise_disk_full)
        with pytest.raises(OSError, match="No space left"):
            build_pair(tmp_path / "ours", [source], tokenizer)
    assert not (tmp_path / "ours.bin").exists()
    summary = build_pair(tmp_path / "ours", [source], tokenizer)
    assert summary.documents == 1000 and summary.new_tokens < summary.tokens
    write_like_megatron(tmp_path / "theirs", make_texts(1000), tokenizer, append_eod=False)
    assert have_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", '{"body": "x"}\n', {}, "a.jsonl:1: has no 'text', but body"),
        ("a.jsonl", '{"text": "x"}\n[1]\n', {}, "a.jsonl:2: has no 'text', but list"),
        ("a.jsonl", '{"text": \n', {}, "a.jsonl:1: is not JSON"),
        ("a.csv", "x", {}, "a.csv: expected .jsonl"),
        ("a.txt", "", {}, "the texts contain no tokens"),
        ("a.parquet", "x", {}, "a.parquet: "),
        ("a.jsonl", '{"text": "w1"}\n', {"key": "body"}, "has no 'body', but text"),
        ("a.jsonl", '{"text": "w1 \\ud800"}\n', {}, "a.jsonl:1: has a lone surrogate at 3"),
        ("a.jsonl.gz", '{"text": "w1"}\n', {}, "a.jsonl.gz: is not a complete gzip file"),
    ],
)
def test_invalid_files_are_rejected(tmp_path, name, content, options, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        build_pair(tmp_path / "ours", [tmp_path / name], make_tokenizer(), **options)
    assert not (tmp_path / "ours.bin").exists() and not (tmp_path / "ours.idx").exists()


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("folder", "datasets")])
def test_missing_table_library_is_reported(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).mkdir() if name == "folder" else (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match=r'tables need datasets: pip install "hf_megatron\[data\]"'):
        build_pair(tmp_path / "ours", [tmp_path / name], make_tokenizer())


def test_existing_pair_is_not_overwritten(tmp_path):
    tokenizer, source = make_tokenizer(), write_lines(tmp_path / "one.jsonl", ["w1 w2"])
    build_pair(tmp_path / "ours", [source], tokenizer)
    with pytest.raises(DataError, match="already exists"):
        build_pair(tmp_path / "ours", [source], tokenizer)
    with pytest.raises(DataError, match="no such file"):
        build_pair(tmp_path / "other", [tmp_path / "nowhere.jsonl"], tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no eos_token"):
        build_pair(tmp_path / "other", [source], tokenizer, append_eod=True)

"""Tests of `hf-megatron data`: info, verify, merge, samples and build on Megatron's indexed datasets."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_megatron.cli import app

DATA = Path(__file__).parents[2] / "data" / "megatron_indexed"
INPUTS, TARGETS = (str(DATA / f"ag_news_prompt_{name}_document") for name in ("inputs", "targets"))


def _run(*words):
    result = CliRunner().invoke(app, ["data", *map(str, words)])
    return result.exit_code, result.output


def test_info_reports_dataset_size():
    code, text = _run("info", INPUTS)
    assert code == 0 and "100 sequences in 100 documents, 5,945 tokens of int32, 59.5 a sequence" in text


def test_verify_detects_invalid_datasets(tmp_path):
    code, text = _run("verify", TARGETS, "--vocab-size", 300_000)
    assert code == 0 and "empty sequences 0" in text
    code, text = _run("verify", TARGETS, "--vocab-size", 10)
    assert code == 1 and "the vocabulary size is 10" in text
    shutil.copyfile(f"{INPUTS}.idx", tmp_path / "cut.idx")
    (tmp_path / "cut.bin").write_bytes(Path(f"{INPUTS}.bin").read_bytes()[:-4])
    code, text = _run("verify", tmp_path / "cut")
    assert code == 1 and "truncated or from another pair" in text


def test_merge_concatenates_datasets(tmp_path):
    code, text = _run("merge", tmp_path / "both", INPUTS, TARGETS)
    assert code == 0 and "200 sequences of 2 pairs" in text
    code, text = _run("merge", tmp_path / "both", INPUTS)
    assert code == 1 and "already exists" in text
    assert _run("merge", tmp_path / "both", INPUTS, "--overwrite")[0] == 0
    assert "100 sequences" in _run("info", tmp_path / "both")[1]


def test_samples_prints_seeded_order():
    code, text = _run("samples", INPUTS, "--seq-length", 32, "--split", "90,10,0", "--limit", 3)
    assert code == 0 and "samples of 32 tokens in 1 epoch" in text and len(text.strip().splitlines()) == 4
    assert "epochs" in _run("samples", INPUTS, "--seq-length", 32, "--samples", 1000)[1]
    # The seed determines the document order.
    seeded = [_run("samples", INPUTS, "--seq-length", 32, "--seed", seed)[1] for seed in (1, 2)]
    assert seeded[0] != seeded[1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["samples", INPUTS, "--seq-length", 32, "--part", "dev"], 2, "expected one of train, valid, test"),
        (["samples", INPUTS, "--seq-length", 32, "--split", "1,0,0", "--part", "test"], 2, "the test split of"),
        (["samples", INPUTS, "--seq-length", 32, "--split", "all"], 1, "expected one to three weights"),
        (["samples", INPUTS, "--seq-length", 100_000], 1, "make no sample of 100000"),
        (["info", "nowhere"], 1, "nowhere.idx: no such file"),
    ],
)
def test_exit_codes_tell_options_from_data(words, code, message):
    result, text = _run(*words)
    assert result == code and message in text


def test_build_tokenizes_documents(tmp_path, stories):
    (tmp_path / "texts.jsonl").write_text('{"text": "Once upon a time"}\n{"text": ""}\n{"text": "a dog"}\n')
    words = "build", tmp_path / "pair", tmp_path / "texts.jsonl", "--tokenizer", stories, "--append-eod"
    code, text = _run(*words)
    assert code == 0 and "3 documents" in text
    # The tokenizer prepends a special token to every text, which Megatron-LM keeps by default.
    assert "3 sequences in 3 documents" in _run("info", tmp_path / "pair")[1]
    plain = tmp_path / "plain"
    assert _run("build", plain, *words[2:], "--no-special-tokens")[0] == 0
    assert "2 sequences in 3 documents" in _run("info", plain)[1]
    assert _run("verify", tmp_path / "pair", "--vocab-size", 512)[0] == 0
    code, text = _run(*words)
    assert code == 1 and "already exists" in text

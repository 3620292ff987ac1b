"""Tests that follow the cures in errors of datasets, streams and schedules."""

import itertools
import json
import os
import shutil

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    BertTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.datasets import build as building
from hf_megatron.datasets.build import build_pair
from hf_megatron.datasets.indexed_writer import IndexedWriter
from hf_megatron.datasets.masked import T5Dataset
from hf_megatron.datasets.pretraining import PretrainingDataset
from hf_megatron.datasets.schedules import MegatronSchedule, MegatronScheduler
from hf_megatron.datasets.streams import SampleStream
from hf_megatron.errors import DataError
from tests.integration.datasets.test_streams import LLAMA, get_stream, merge_replicas, read_samples, train
from tests.unit.datasets.test_build import have_same_files, make_texts, make_tokenizer, write_like_megatron, write_lines

ROWS, LENGTH = 23, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with samples in three files, and a model."""
    folder = tmp_path_factory.mktemp("stream")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 64, (ROWS, LENGTH), generator=generator).tolist()
    for number, part in enumerate((rows[:9], rows[9:17], rows[17:])):
        lines = "".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in part)
        (folder / f"{number}.jsonl").write_text(lines)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(folder / "model")
    return folder


def interrupt_build(prefix, source, tokenizer, monkeypatch):
    """Builds a pair until its second progress record, at which the disk is full."""
    original, calls = building._Build._keep, []

    def raise_disk_full(self):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(building, "_KEPT_EVERY", 0.0)
        patch.setattr(building._Build, "_keep", raise_disk_full)
        with pytest.raises(OSError, match="No space left"):
            build_pair(prefix, [source], tokenizer)


def test_interrupted_build_is_resumed_or_removed(tmp_path, monkeypatch):
    tokenizer, prefix = make_tokenizer(), tmp_path / "ours"
    one = write_lines(tmp_path / "one.jsonl", make_texts(1000))
    two = write_lines(tmp_path / "two.jsonl", make_texts(1000, seed=1))
    for name, (source, seed) in {"same": (one, 0), "other": (two, 1)}.items():
        interrupt_build(prefix, one, tokenizer, monkeypatch)
        with pytest.raises(DataError, match=r"different sources\. Use the same values again, or remove the folder\."):
            build_pair(prefix, [two], tokenizer)
        if name == "other":
            shutil.rmtree(f"{prefix}.building")
        assert build_pair(prefix, [source], tokenizer).documents == 1000
        write_like_megatron(tmp_path / name, make_texts(1000, seed), tokenizer, append_eod=False)
        assert have_same_files(prefix, tmp_path / name)
        for kind in ("bin", "idx"):
            os.remove(f"{prefix}.{kind}")


def test_damaged_build_is_removed(tmp_path, monkeypatch):
    tokenizer, prefix = make_tokenizer(), tmp_path / "ours"
    source = write_lines(tmp_path / "one.jsonl", make_texts(1000))
    interrupt_build(prefix, source, tokenizer, monkeypatch)
    os.truncate(tmp_path / "ours.building" / "bin", 1)
    with pytest.raises(DataError, match=r"bin: has 1 bytes, expected at least \d+\. Remove the folder\."):
        build_pair(prefix, [source], tokenizer)
    shutil.rmtree(f"{prefix}.building")
    assert build_pair(prefix, [source], tokenizer).documents == 1000
    write_like_megatron(tmp_path / "theirs", make_texts(1000), tokenizer, append_eod=False)
    assert have_same_files(prefix, tmp_path / "theirs")


def test_sentinels_are_passed(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]", *(f"word{index}" for index in range(60))]
    tokenizer = BertTokenizer(
        {token: index for index, token in enumerate(tokens)}, bos_token="[BOS]", eos_token="[EOS]"
    )
    with IndexedWriter(tmp_path / "pair", "uint16") as writer:
        for start in range(7, 17):
            writer.add_document([list(range(start, start + 12)), list(range(start + 3, start + 20))])
    settings = {"source": str(tmp_path / "pair"), "sequence_length": 24, "target_length": 24, "tokenizer": tokenizer}
    with pytest.raises(
        DataError, match=r"no <extra_id_0>\. Pass sentinels=, the token ids that replace masked spans\."
    ):
        T5Dataset(**settings)
    sentinels = list(range(50, 67))
    sample = T5Dataset(**settings, sentinels=sentinels)[0]
    assert set(sample["labels"].tolist()) & set(sentinels)
    config = T5Config(vocab_size=len(tokens), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config)(**{name: value[None] for name, value in sample.items()}).loss.backward()


def test_scheduled_weight_decay_is_set_in_groups():
    weight, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    schedule = MegatronSchedule(1.0)
    message = r"Set it above 0 for the groups that need it \(weight_decay of TrainingArguments or the optimizer\)\."
    with pytest.raises(DataError, match=message):
        MegatronScheduler(torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=1.0), schedule, 1)
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = MegatronScheduler(optimizer, schedule, 1)
    optimizer.step()
    scheduler.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [schedule.end_weight_decay, 0.0]


def test_ordered_dataset_is_passed_to_trainer(folder, tmp_path):
    with IndexedWriter(tmp_path / "pair", "uint16") as writer:
        for start in range(40):
            writer.add_document([[(start + offset) % 64 for offset in range(LENGTH + 1)]])
    dataset = PretrainingDataset(str(tmp_path / "pair"), LENGTH)
    with pytest.raises(DataError, match=r"resumes without a stream\. Pass it to Trainer directly\."):
        SampleStream(dataset)
    sizes = {"dp_size": 2}
    ranks = run_ranks(train, 2, folder, tmp_path, sizes, rows=2, steps=2, stop=2, data=lambda: dataset)
    samples = merge_replicas(ranks)
    read = [row for step in samples for replica in samples[step] for row in replica]
    assert sorted(read) == sorted(dataset[index]["input_ids"].tolist() for index in range(8))


def test_stream_of_a_restarting_iterable(folder):
    rows = [{"input_ids": torch.tensor([number])} for number in range(3)]
    with pytest.raises(
        DataError, match=r"cannot restart\. Pass an iterable that starts from the beginning each time\."
    ):
        SampleStream(iter(rows))
    read = itertools.islice(SampleStream(rows), 7)
    assert [int(row["input_ids"]) for row in read] == [0, 1, 2, 0, 1, 2, 0]


def test_stream_in_at_most_one_worker(folder):
    def read(workers):
        stream = get_stream(folder, passes=1)
        loader = DataLoader(stream, 2, num_workers=workers, collate_fn=default_data_collator)
        return [row for batch in loader for row in batch["input_ids"].tolist()]

    with pytest.raises(DataError, match=r"A stream cannot be split over 2 workers\. Use 0 or 1\."):
        read(2)
    for workers in (0, 1):
        assert sorted(read(workers)) == sorted(read_samples(folder, 0, ROWS))

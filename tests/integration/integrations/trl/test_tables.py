"""Tests that TRL trainers read tables of Megatron's samples in Megatron's order and resume with the next sample."""

import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.datasets.dataset_order import has_own_order
from hf_megatron.datasets.indexed_writer import IndexedWriter
from hf_megatron.datasets.ordered_dataset import WithoutSamples
from hf_megatron.datasets.pretraining import PretrainingDataset
from hf_megatron.datasets.table_datasets import build_table
from hf_megatron.errors import DataError
from hf_megatron.parallel_state import parallel_state

LENGTH, SAMPLES = 16, 40
OPTIONS = {"logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "use_cpu": True, "bf16": False}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix, drawn = tmp_path_factory.mktemp("data") / "corpus_text_document", random.Random(0)
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(40):
            writer.add_document([[drawn.randrange(5, 500) for _ in range(drawn.randrange(40))] + [2]])
    return str(prefix)


def make_dataset(prefix, **options):
    return PretrainingDataset(prefix, LENGTH, SAMPLES, eod_token=2, eod_mask_loss=True, **options)


def train(stories, prefix, output, sizes, *, rows, steps, stop=None, resume=None, table=True, edit=lambda rows: rows):
    """Returns the samples of each microbatch of this replica, its dp rank, and the losses."""
    layout = {} if sizes is None else {"megatron_config": MegatronConfig(**sizes)}
    model, dataset, ids = AutoModelForCausalLM.from_pretrained(stories, **layout), make_dataset(prefix), []
    options = {
        "per_device_train_batch_size": rows, "max_steps": steps, "gradient_accumulation_steps": 2,
        "save_strategy": "no" if stop is None else "steps", "save_steps": stop or 1, **OPTIONS,
    }  # fmt: skip
    if table:
        arguments = SFTConfig(str(output), dataset_kwargs={"skip_prepare_dataset": True}, **options)
        trainer = SFTTrainer(model, arguments, train_dataset=edit(build_table(dataset)))
    else:
        trainer = Trainer(model, TrainingArguments(str(output), **options), default_data_collator, dataset)
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        ids.append(inputs["input_ids"][:, :LENGTH].tolist())
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    if stop is not None:
        trainer.state.max_steps = trainer.args.max_steps = stop + 1
    trainer.train(resume_from_checkpoint=resume)
    state = parallel_state(model)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return ids, 0 if state is None else state.mesh.dp_rank, losses


def test_losses_and_samples_match_trainer(stories, prefix, tmp_path):
    samples = [make_dataset(prefix)[sample]["input_ids"].tolist() for sample in range(SAMPLES)]
    [(_, _, losses)] = run_ranks(train, 1, stories, prefix, tmp_path, None, rows=4, steps=3, table=False)
    for sizes, ranks in ((None, 1), ({"tp_size": 2}, 2), ({"dp_size": 2}, 2)):
        replicas = (sizes or {}).get("dp_size", 1)
        results = run_ranks(train, ranks, stories, prefix, tmp_path, sizes, rows=4 // replicas, steps=3)
        assert results[0][2] == pytest.approx(losses, abs=2e-4)
        for ids, rank, _ in results:
            each = 4 // replicas
            assert ids == [samples[4 * call + each * rank :][:each] for call in range(6)]


def test_training_resumes_with_the_next_samples(stories, prefix, tmp_path):
    samples = [make_dataset(prefix)[sample]["input_ids"].tolist() for sample in range(SAMPLES)]
    run_ranks(train, 2, stories, prefix, tmp_path, {"tp_size": 2}, rows=2, steps=3, stop=2)
    resume = str(tmp_path / "checkpoint-2")
    for ids, rank, _ in run_ranks(train, 2, stories, prefix, tmp_path, {"dp_size": 2}, rows=3, steps=4, resume=resume):
        assert ids == [samples[8 + 6 * call + 3 * rank :][:3] for call in range(4)]


def shuffle_table(table):
    return table.shuffle(seed=1)


def select_part(table):
    return table.select(range(8))


@pytest.mark.parametrize("edit", [shuffle_table, select_part])
def test_reordered_tables_are_rejected(stories, prefix, tmp_path, edit):
    with pytest.raises(DataError, match="samples were moved or removed"):
        train(stories, prefix, tmp_path, None, rows=4, steps=2, edit=edit)


def test_label_replacing_collators_are_rejected(stories, prefix, tmp_path):
    """Labels copied from the inputs would include tokens that the dataset ignores."""
    tokenizer = AutoTokenizer.from_pretrained(stories, pad_token="</s>")
    arguments = TrainingArguments(str(tmp_path), max_steps=1, **OPTIONS)
    model, collator = (
        AutoModelForCausalLM.from_pretrained(stories),
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    table = build_table(make_dataset(prefix))
    with pytest.raises(DataError, match="LanguageModeling replaces .* Use DataCollatorForSeq2Seq or TRL's collator"):
        Trainer(model, arguments, collator, table).train()
    trainer = Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), table)
    batch = {name: torch.tensor(table[:8][name]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        expected = model(**batch).loss.item()
    assert trainer.train().training_loss == pytest.approx(expected, abs=1e-4)


def test_table_labels_are_unshifted(prefix):
    dataset = make_dataset(prefix)
    table = build_table(WithoutSamples(dataset, [(1, 3)]))
    assert has_own_order(table) and len(table) == len(dataset) - 2
    for number, sample in ((0, 0), (1, 3)):
        assert table[number]["input_ids"][:LENGTH] == dataset[sample]["input_ids"].tolist()
        assert table[number]["labels"] == [-100, *dataset[sample]["labels"].tolist()]
    with pytest.raises(DataError, match="TRL drops position_ids"):
        build_table(make_dataset(prefix, restart="eod"))
    with pytest.raises(DataError, match="list: expected a dataset"):
        build_table([])

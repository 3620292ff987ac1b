"""Tests of sample streams: split over data parallel ranks only, and resumed at the next sample on any layout."""

import functools
import itertools
import json
import os
import random

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.datasets.ordered_dataset import OrderedDataset
from hf_megatron.datasets.ramp_up import BatchRampUp
from hf_megatron.datasets.streams import SampleStream
from hf_megatron.errors import DataError, RankError
from hf_megatron.integrations.trainer.sample_counter import SamplesCallback
from hf_megatron.parallel_state import parallel_state

datasets = pytest.importorskip("datasets")

ROWS, LENGTH = 23, 8
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
LAYOUTS = {
    "tp2": {"tp_size": 2},
    "dp2": {"dp_size": 2},
    "cp2": {"cp_size": 2},
    "tp2+dp2": {"tp_size": 2, "dp_size": 2},
    "pp2+dp2": {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with samples in three files, and a model."""
    folder = tmp_path_factory.mktemp("stream")
    rng = random.Random(0)
    rows = [[number, *(rng.randrange(64) for _ in range(LENGTH - 1))] for number in range(ROWS)]
    for number, size in enumerate((9, 8, 6)):
        part, rows = rows[:size], rows[size:]
        lines = "".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in part)
        (folder / f"{number}.jsonl").write_text(lines)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(folder / "model")
    return folder


def get_stream(folder, passes=None, seed=1):
    """Returns a stream that is reshuffled in each pass."""
    files = sorted(map(str, folder.glob("*.jsonl")))
    rows = datasets.IterableDataset.from_generator(read, gen_kwargs={"files": files})
    return SampleStream(rows.shuffle(seed=seed, buffer_size=5), passes=passes)


def read(files):
    for file in files:
        with open(file) as lines:
            yield from map(json.loads, lines)


def read_samples(folder, first, stop, workers=0):
    """Returns the samples `first` to `stop` of the global stream; in a worker, `datasets` shuffles in another order."""
    rows = get_stream(folder)
    if workers:
        rows = DataLoader(rows, None, num_workers=1)
    return [torch.as_tensor(row["input_ids"]).tolist() for row in itertools.islice(rows, first, stop)]


def train(
    folder, output, sizes, *, rows, accumulate=1, steps, stop=None, resume=None, data=None, change=None, **options
):
    """Returns the samples of each step that this rank's replica read, its dp rank, and the logged losses."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", megatron_config=MegatronConfig(**sizes))
    state, samples_by_step, ids = parallel_state(model), {}, []
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=rows, gradient_accumulation_steps=accumulate, max_steps=steps,
        save_strategy="no" if stop is None else "steps", save_steps=1, logging_steps=1, learning_rate=1e-2,
        lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[], use_cpu=True, **options,
    )  # fmt: skip
    stream = get_stream(folder) if data is None else data()
    if change is not None:
        change(stream)
    trainer = Trainer(model, arguments, default_data_collator, stream)
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        ids.extend(inputs["input_ids"].tolist())
        return original(model, inputs, *args, **kwargs)

    def on_save(args, state, control, **kwargs):
        samples_by_step[state.global_step] = list(ids)
        ids.clear()
        control.should_training_stop = state.global_step == stop

    trainer.compute_loss = compute_loss
    [flow] = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == "DefaultFlowCallback"]
    flow.on_save = on_save
    trainer.train(resume_from_checkpoint=resume)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return samples_by_step, 0 if state is None else state.mesh.dp_rank, losses


def merge_replicas(ranks):
    """Returns the samples of each step by replica; asserts that all ranks of a replica read the same samples."""
    replicas = {}
    for steps, rank, _ in ranks:
        assert replicas.setdefault(rank, steps) == steps
    return {step: [replicas[rank][step] for rank in sorted(replicas)] for step in replicas[0]}


def split_by_replica(rows, replicas, of_a_call):
    """Returns each replica's samples of a step: consecutive blocks of `of_a_call` samples, one per call, in turn."""
    blocks = [rows[start : start + of_a_call] for start in range(0, len(rows), of_a_call)]
    return [sum(blocks[replica::replicas], []) for replica in range(replicas)]


def draw_runs():
    rng = random.Random(4)
    for number in range(12):
        yield (
            number,
            [
                (layout := rng.choice([*LAYOUTS]), (2 if layout == "pp2+dp2" else 1) * rng.choice([1, 2]),
                 rng.choice([1, 2]), rng.choice([1, 2, 3]))
                for _ in range(3)
            ],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "parts"), draw_runs(), ids=lambda value: str(value) if isinstance(value, int) else ""
)
def test_resumed_runs_read_each_sample_once(folder, tmp_path, number, parts):
    """Resumes a run twice on other layouts and batch sizes, over several passes; with and without a worker."""
    done, resume, first, workers = 0, None, 0, number % 3 // 2
    for layout, rows, accumulate, steps in parts:
        sizes, done = LAYOUTS[layout], done + steps
        replicas = sizes.get("dp_size", 1)
        ranks = run_ranks(
            train, MegatronConfig(**sizes).ranks_per_replica * replicas, folder, tmp_path, sizes, rows=rows,
            accumulate=accumulate, steps=done + 1, stop=done, resume=resume,
            dataloader_num_workers=workers,
        )  # fmt: skip
        samples_by_step = merge_replicas(ranks)
        assert list(samples_by_step) == list(range(done - steps + 1, done + 1))
        for step in samples_by_step:
            step_size = replicas * rows * accumulate
            assert samples_by_step[step] == split_by_replica(
                read_samples(folder, first, first + step_size, workers), replicas, rows
            )
            first += step_size
        resume = str(tmp_path / f"checkpoint-{done}")


def train_by_hand(folder, ends):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0), []
    for first, stop in itertools.pairwise([0, *ends]):
        ids = torch.tensor(read_samples(folder, first, stop))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def set_ramp_up(stream):
    stream.ramp_up = BatchRampUp(8, start=4, increment=4, samples=8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_match_manual_loop(folder, tmp_path, layout):
    """Includes batch size ramp-up."""
    sizes = LAYOUTS[layout]
    replicas = sizes.get("dp_size", 1)
    ranks = run_ranks(
        train, MegatronConfig(**sizes).ranks_per_replica * replicas, folder, tmp_path, sizes, rows=2,
        accumulate=4 // replicas, steps=4, change=set_ramp_up,
    )  # fmt: skip
    assert ranks[0][2] == pytest.approx(train_by_hand(folder, [4, 8, 16, 24]), abs=2e-4)


def skip_samples(stream):
    stream.seen = 30


def test_stream_starts_after_seen_samples(folder, tmp_path):
    [(steps, *_)] = run_ranks(train, 1, folder, tmp_path, {"tp_size": 1}, rows=4, steps=3, stop=2, change=skip_samples)
    assert steps == {1: read_samples(folder, 30, 34), 2: read_samples(folder, 34, 38)}


def test_stream_ends_after_its_passes(folder, tmp_path):
    data = lambda: get_stream(folder, passes=1)  # noqa: E731
    [(_, _, losses)] = run_ranks(train, 1, folder, tmp_path, {"tp_size": 1}, rows=4, steps=9, data=data)
    assert len(losses) == ROWS // 4 + 1
    assert len(list(data())) == ROWS


class Tensors(IterableDataset):
    """Tensor samples, which have another address in every process."""

    def __iter__(self):
        for number in range(40):
            yield {"input_ids": torch.full((4,), number), "labels": torch.full((4,), number)}


def test_tensor_samples_resume(folder, tmp_path):
    run = {"rows": 2, "data": lambda: SampleStream(Tensors())}
    run_ranks(train, 2, folder, tmp_path, {"dp_size": 2}, steps=3, stop=2, **run)
    resume_options = {"steps": 4, "stop": 4, "resume": str(tmp_path / "checkpoint-2")}
    for steps, *_ in run_ranks(train, 2, folder, tmp_path, {"tp_size": 2}, **run, **resume_options):
        assert [row[0] for row in steps[3]] == [8, 9]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.bool, torch.int64])
def test_fingerprint_depends_on_values(kind):
    rows = [[{"x": torch.ones(shape, dtype=kind) * number} for number in (1, first)] for first in (0, 0, 1)
            for shape in ((), (2, 3))]  # fmt: skip
    one, other, again, _, changed, _ = [SampleStream(row).fingerprint() for row in rows]
    assert one == again and len({one, other, changed}) == 3


def get_broken_stream(folder, output):
    """Returns a stream that cannot be read on rank 1."""
    stream = get_stream(folder)
    if int(os.environ["RANK"]) == 1:
        stream.rows = None
    return stream


def test_read_error_stops_all_ranks(folder, tmp_path):
    with pytest.raises(RankError, match="could not be read on rank 1"):
        run_ranks(
            train,
            2,
            folder,
            tmp_path,
            {"dp_size": 2},
            rows=2,
            steps=2,
            data=functools.partial(get_broken_stream, folder, tmp_path),
        )


def train_after_an_error(folder, output):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=2, max_steps=3, save_strategy="no", report_to=[], use_cpu=True,
        eval_strategy="steps", eval_steps=3,
    )  # fmt: skip
    endless = Trainer(model, arguments, default_data_collator, get_stream(folder), get_stream(folder))
    message = "Evaluation needs a finite SampleStream .*Pass another SampleStream with passes=1"
    with pytest.raises(DataError, match=message):
        endless.train()
    assert endless.state.global_step == 0
    stream = get_stream(folder, passes=1)
    trainer = Trainer(model, arguments, default_data_collator, stream, get_stream(folder, passes=1))
    stream.seen = 4
    loss = trainer.compute_loss

    def fails(*args, **kwargs):
        raise RuntimeError("once")

    trainer.compute_loss = fails
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    trainer.compute_loss = loss
    assert (stream.begin, stream.batch) == (0, 0)
    assert trainer.evaluate(stream)["eval_loss"] > 0
    # Creating another loader during training must not consume samples.
    counted = []
    trainer.add_callback(LoaderCallback(trainer, counted))
    trainer.train()
    return counted


class LoaderCallback(TrainerCallback):
    def __init__(self, trainer, counted):
        self.trainer, self.counted = trainer, counted

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.get_train_dataloader()
        [one] = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, SamplesCallback)]
        self.counted.append(one.consumed)


def test_failed_run_leaves_no_state(folder, tmp_path):
    assert run_ranks(train_after_an_error, 1, folder, tmp_path) == [[6, 8, 10]]


class Numbers(IterableDataset):
    """A plain torch stream, whose samples only the upstream Trainer counts."""

    def __iter__(self):
        for number in range(40):
            yield {"input_ids": torch.full((4,), number), "labels": torch.full((4,), number)}


def test_resume_with_other_step_size_is_rejected(folder, tmp_path):
    run = {"rows": 2, "data": Numbers}
    ranks = run_ranks(train, 2, folder, tmp_path, {"dp_size": 2}, steps=3, stop=2, **run)
    assert [[row[0] for row in steps[2]] for steps, *_ in ranks] == [[4, 5], [6, 7]]
    resume_options = {"steps": 4, "stop": 4, "resume": str(tmp_path / "checkpoint-2")}
    ranks = run_ranks(train, 2, folder, tmp_path, {"dp_size": 2}, **run, **resume_options)
    assert [[row[0] for row in steps[3]] for steps, *_ in ranks] == [[8, 9], [10, 11]]
    message = "A step has 2 samples of the stream, but had 4 .*Give Trainer a SampleStream of the data"
    with pytest.raises(RankError, match=message):
        run_ranks(train, 2, folder, tmp_path, {"tp_size": 2}, **run, **resume_options)
    run |= {"data": lambda: SampleStream(Numbers())}
    run_ranks(train, 2, folder, tmp_path / "counted", {"dp_size": 2}, steps=3, stop=2, **run)
    resume_options["resume"] = str(tmp_path / "counted" / "checkpoint-2")
    ranks = run_ranks(train, 2, folder, tmp_path / "counted", {"tp_size": 2}, **run, **resume_options)
    assert [[row[0] for row in steps[3]] for steps, *_ in ranks] == [[8, 9]] * 2


def test_changed_stream_is_rejected(folder, tmp_path):
    run_ranks(train, 1, folder, tmp_path, {"tp_size": 1}, rows=2, steps=3, stop=2)
    resume_options = {"rows": 2, "steps": 4, "resume": str(tmp_path / "checkpoint-2")}
    with pytest.raises(RankError, match="workers was 0 and is 1"):
        run_ranks(train, 1, folder, tmp_path, {"tp_size": 1}, dataloader_num_workers=1, **resume_options)
    with pytest.raises(RankError, match="name was None and is other"):
        run_ranks(train, 1, folder, tmp_path, {"tp_size": 1}, change=rename_stream, **resume_options)
    with pytest.raises(RankError, match="first rows was"):
        run_ranks(train, 1, folder, tmp_path, {"tp_size": 1}, data=lambda: get_stream(folder, seed=2), **resume_options)


def test_ranks_with_different_samples_are_rejected(folder, tmp_path):
    unseeded = {"data": lambda: get_stream(folder, seed=None)}
    message = "ranks read different samples of the stream. Give shuffling and sampling a fixed seed, and do not shard"
    with pytest.raises(RankError, match=message):
        run_ranks(train, 2, folder, tmp_path, {"dp_size": 2}, rows=2, steps=2, **unseeded)
    for _, _, losses in run_ranks(train, 2, folder, tmp_path, {"dp_size": 2}, rows=2, steps=2):
        assert losses == pytest.approx(train_by_hand(folder, [4, 8]), abs=2e-4)


class SmallBatchTrainer(Trainer):
    """Raises an out-of-memory error for batches of more than two samples."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate a row.")
        self.seen += inputs["input_ids"].tolist()
        return super().compute_loss(model, inputs, *args, **kwargs)


def find_batch_size(folder, output):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", megatron_config=MegatronConfig(dp_size=2))
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=4, auto_find_batch_size=True, max_steps=2, save_steps=2, report_to=[],
        use_cpu=True,
    )  # fmt: skip
    stream = get_stream(folder)
    trainer = SmallBatchTrainer(model, arguments, default_data_collator, stream)
    trainer.seen = []
    trainer.train()
    # After training, the stream starts at its first sample again.
    return trainer.seen, stream.begin


def test_failed_batches_are_not_counted(folder, tmp_path):
    ranks = run_ranks(find_batch_size, 2, folder, tmp_path)
    stream_samples = read_samples(folder, 0, 8)
    assert [samples for samples, _ in ranks] == [
        stream_samples[0:2] + stream_samples[4:6],
        stream_samples[2:4] + stream_samples[6:8],
    ]
    assert [begin for _, begin in ranks] == [0, 0]
    callback_states = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert callback_states["SamplesCallback"]["attributes"]["consumed"] == 8


def extend_sample(row):
    return {name: row["input_ids"] + [1] * (row["input_ids"][0] % 3) for name in ("input_ids", "labels")}


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([list(row[name]) + [value] * (longest - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


def train_padded(folder, output, sizes, rows):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", megatron_config=MegatronConfig(**sizes))
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=rows, max_steps=4, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    stream = get_stream(folder)
    stream.rows = stream.rows.map(extend_sample)
    trainer = Trainer(model, arguments, pad, stream)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_samples_with_unequal_lengths(folder, tmp_path):
    """Each rank pads its own batch: one rank could not split batches of different lengths for the others."""
    [losses] = run_ranks(train_padded, 1, folder, tmp_path, {"tp_size": 1}, 4)
    for values in run_ranks(train_padded, 2, folder, tmp_path, {"dp_size": 2}, 2):
        assert values == pytest.approx(losses, abs=2e-4)


def rename_stream(stream):
    stream.order_key["name"] = "other"


def test_unordered_streams_are_rejected(folder, tmp_path):
    [messages] = run_ranks(collect_errors, 1, folder, tmp_path)
    assert all("Use 0 or 1" in message for message in messages[:2])
    assert "multiples of 8" in messages[2] and "pass 0 over the stream yields no samples" in messages[3]
    with pytest.raises(DataError, match="passes = 0"):
        SampleStream([], passes=0)
    with pytest.raises(DataError, match="list_iterator is an iterator, which cannot restart"):
        SampleStream(iter([]))
    with pytest.raises(DataError, match="OrderedDataset has its own order"):
        SampleStream(OrderedDataset())


def collect_errors(folder, output):
    messages = []
    for options in ({"dataloader_num_workers": 2}, {"change": set_ramp_up, "rows": 8}):
        with pytest.raises(DataError) as error:
            train(folder, output, {"tp_size": 1}, steps=2, **{"rows": 2, **options})
        messages.append(str(error.value))
    train(folder, output, {"tp_size": 1}, steps=1, rows=2, dataloader_num_workers=1)
    with pytest.raises(DataError) as error:
        next(iter(DataLoader(get_stream(folder), 2, num_workers=2)))
    with pytest.raises(DataError) as nothing:
        next(iter(SampleStream([])))
    return [messages[0], str(error.value), messages[1], str(nothing.value)]


def evaluate(folder, output, sizes, rows):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", megatron_config=MegatronConfig(**sizes))
    arguments = TrainingArguments(str(output), per_device_eval_batch_size=rows, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments, default_data_collator)
    with pytest.raises(DataError, match="Evaluation needs a finite SampleStream"):
        trainer.evaluate(get_stream(folder))
    return trainer.evaluate(get_stream(folder, passes=1))["eval_loss"]


def test_evaluation_ends(folder, tmp_path):
    ids = torch.tensor(read_samples(folder, 0, ROWS))
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    expected = model(input_ids=ids, labels=ids).loss.item()
    for sizes, ranks, rows in (({"tp_size": 1}, 1, ROWS), ({"dp_size": 2}, 2, 12), ({"tp_size": 2}, 2, ROWS)):
        assert run_ranks(evaluate, ranks, folder, tmp_path, sizes, rows)[0] == pytest.approx(expected, abs=1e-4)


def read_with_accelerate(folder):
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2, dp_size=2))
    _, loader = Accelerator(cpu=True).prepare(
        model, DataLoader(get_stream(folder), 3, collate_fn=default_data_collator)
    )
    return parallel_state(model).mesh.dp_rank, next(iter(loader))["input_ids"].tolist()


def test_accelerate_loader_splits_stream(folder):
    for rank, rows in run_ranks(read_with_accelerate, 4, folder):
        assert rows == read_samples(folder, 3 * rank, 3 * rank + 3)

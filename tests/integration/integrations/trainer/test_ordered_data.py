"""Tests that Trainer reads samples in Megatron's order on all layouts and resumes with the next sample."""

import itertools
import json
import random
import shutil
from pathlib import Path

import peft
import pytest
import torch
from torch.utils.data import DataLoader, Subset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertTokenizer,
    LlamaConfig,
    MixtralConfig,
    T5Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.datasets.blended import BlendedDataset
from hf_megatron.datasets.indexed_writer import IndexedWriter
from hf_megatron.datasets.masked import BertDataset, T5Dataset
from hf_megatron.datasets.ordered_dataset import WithoutSamples
from hf_megatron.datasets.pretraining import PretrainingDataset
from hf_megatron.datasets.ramp_up import BatchRampUp
from hf_megatron.datasets.schedules import MegatronSchedule, MegatronScheduler
from hf_megatron.errors import DataError, RankError
from hf_megatron.integrations.trainer.sample_counter import SamplesCallback
from hf_megatron.parallel_state import parallel_state

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
LAYOUTS = {
    "one process": None,
    "tp2": {"tp_size": 2},
    "dp2": {"dp_size": 2},
    "dp4": {"dp_size": 4},
    "cp2": {"cp_size": 2},
    "tp2+dp2": {"tp_size": 2, "dp_size": 2},
    "pp2+dp2": {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
}
LENGTH, SAMPLES = 16, 48


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "corpus_text_document"
    drawn = random.Random(0)
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(60):
            writer.add_document([[drawn.randrange(1, 96) for _ in range(drawn.randrange(0, 40))] + [0]])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(prefix.parent / "model")
    return str(prefix)


def dataset_of(prefix, samples=SAMPLES, **options):
    return PretrainingDataset(prefix, LENGTH, samples, eod_token=0, **options)


def ranks_of(sizes):
    layout = MegatronConfig(**sizes or {})
    return layout.ranks_per_replica * (layout.dp_size or 1)


class SampleRecorder(TrainerCallback):
    """Records the tokens that this replica reads in each step."""

    def __init__(self, kill_at=None):
        self.steps, self.kill_at = {}, kill_at
        self._ids = []

    def watch(self, trainer):
        original = trainer.compute_loss

        def compute_loss(model, inputs, *args, **kwargs):
            assert inputs["shift_labels"] is not None
            self._ids += [row.tolist() for row in inputs["input_ids"]]
            return original(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss

    def on_step_end(self, args, state, control, **kwargs):
        self.steps[state.global_step], self._ids = self._ids, []

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.kill_at:
            control.should_training_stop = True


def train(
    prefix,
    output,
    sizes,
    *,
    rows,
    steps,
    accumulate=1,
    stop=None,
    resume=None,
    samples=SAMPLES,
    ramp_up=None,
    **options,
):
    """Returns the samples of each step of this replica, its dp rank, and the losses."""
    layout = {} if sizes is None else {"megatron_config": MegatronConfig(**sizes)}
    model = AutoModelForCausalLM.from_pretrained(Path(prefix).parent / "model", **layout)
    state, recorder = parallel_state(model), SampleRecorder(stop)
    arguments = TrainingArguments(
        str(output),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulate,
        max_steps=steps,
        save_strategy="no" if stop is None else "steps",
        save_steps=1,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        **options,
    )
    dataset = dataset_of(prefix, samples)
    if ramp_up is not None:
        dataset.ramp_up = ramp_up
    trainer = Trainer(model, arguments, default_data_collator, dataset, callbacks=[recorder])
    recorder.watch(trainer)
    trainer.train(resume_from_checkpoint=resume)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return recorder.steps, 0 if state is None else state.mesh.dp_rank, losses


def given(ranks):
    """Returns the samples of each step by replica, in the rank order of Megatron's sampler."""
    replicas = {}
    for steps, rank, _ in ranks:
        assert replicas.setdefault(rank, steps) == steps
    return {step: [replicas[rank][step] for rank in sorted(replicas)] for step in replicas[0]}


def list_megatron_samples(prefix, first, steps, dp_size, rows, accumulate, samples=SAMPLES):
    """Returns the samples that `MegatronPretrainingSampler` assigns to each rank: consecutive blocks per microbatch."""
    dataset, batches = dataset_of(prefix, samples), {}
    for step in steps:
        batches[step] = [[] for _ in range(dp_size)]
        for _ in range(accumulate):
            for rank in range(dp_size):
                batches[step][rank] += [dataset[first + row]["input_ids"].tolist() for row in range(rows)]
                first += rows
    return batches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_match_megatron_order(prefix, tmp_path, layout):
    sizes = LAYOUTS[layout]
    dp_size = (sizes or {}).get("dp_size", 1)
    options = {"rows": 4 // dp_size, "accumulate": 2, "steps": 4}
    one = train if sizes is None else None
    ranks = (
        [one(prefix, tmp_path, None, **options)]
        if one
        else run_ranks(train, ranks_of(sizes), prefix, tmp_path, sizes, **options)
    )
    assert given(ranks) == list_megatron_samples(prefix, 0, range(1, 5), dp_size, 4 // dp_size, 2)
    [(_, _, losses)] = run_ranks(train, 1, prefix, tmp_path / "one", None, rows=4, accumulate=2, steps=4)
    assert ranks[0][2] == pytest.approx(losses, abs=2e-4)


def test_labels_are_shifted_once(prefix):
    """The loss predicts each next token, including the token after the end of the input."""
    torch.manual_seed(0)
    model, dataset = AutoModelForCausalLM.from_config(LLAMA), dataset_of(prefix)
    batch = default_data_collator([dataset[0], dataset[1]])
    tokens = torch.stack([torch.from_numpy(dataset.tokens(sample)[0]) for sample in (0, 1)])
    expected_loss = model(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(model(**batch).loss, expected_loss)


def draw_runs():
    """Yields random layouts and batch sizes for three segments of a run.

    A single process writes stock checkpoints, which only a single process can resume: it can only come last.
    """
    drawn = random.Random(0)
    for number in range(20):
        yield (
            number,
            [
                (
                    layout := drawn.choice([*LAYOUTS][0 if part == 2 else 1 :]),
                    drawn.choice([1, 2]) * (2 if layout == "pp2+dp2" else 1),
                    drawn.choice([1, 2]),
                    drawn.choice([1, 2]),
                )
                for part in range(3)
            ],
        )


@pytest.mark.parametrize(
    ("number", "parts"), draw_runs(), ids=lambda value: str(value) if isinstance(value, int) else ""
)
def test_stopped_runs_see_every_sample_once(prefix, tmp_path, number, parts):
    """Three segments with different layouts, accumulation and batch sizes read the sequence of an uninterrupted run."""
    done, resume, positions, first = 0, None, [], 0
    for layout, rows, accumulate, steps in parts:
        sizes = LAYOUTS[layout]
        done += steps
        ranks = run_ranks(
            train, ranks_of(sizes), prefix, tmp_path, sizes, rows=rows, accumulate=accumulate, steps=done + 1,
            stop=done, resume=resume,
        )  # fmt: skip
        dp_size = (sizes or {}).get("dp_size", 1)
        steps_seen = {step: rows for step, rows in given(ranks).items() if step <= done}
        assert steps_seen == list_megatron_samples(prefix, first, steps_seen, dp_size, rows, accumulate)
        assert list(steps_seen) == list(range(done - steps + 1, done + 1))
        first += steps * dp_size * rows * accumulate
        resume = str(tmp_path / f"checkpoint-{done}")
        positions.append(first)


def test_resume_with_changed_data_raises(prefix, tmp_path):
    train(prefix, tmp_path, None, rows=4, steps=3, stop=2)
    resume_options = {"rows": 4, "steps": 4, "resume": str(tmp_path / "checkpoint-2")}
    with pytest.raises(DataError, match=r"epochs\[0\] was \d+ and is \d+"):
        train(prefix, tmp_path, None, samples=400, **resume_options)
    other = Path(prefix).with_name("other")
    with IndexedWriter(other, "uint16") as writer:
        writer.add_document([list(range(1, 90)) * 12])
    with pytest.raises(DataError, match="files.sequences was 60 and is 1"):
        train(str(other), tmp_path, None, **resume_options)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["SamplesCallback"]
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="Pass ignore_data_skip=True to start with the first sample"):
        train(prefix, tmp_path, None, **resume_options)
    steps, *_ = train(str(other), tmp_path, None, ignore_data_skip=True, stop=4, **resume_options)
    assert steps == {key: rows[0] for key, rows in list_megatron_samples(str(other), 0, [3, 4], 1, 4, 1).items()}


def test_more_steps_than_samples_raise(prefix, tmp_path):
    size = len(dataset_of(prefix, None))
    steps = -(-size // 4)
    with pytest.raises(DataError, match=f"{steps + 1} steps of 4 samples need more than the {size}"):
        train(prefix, tmp_path, None, rows=4, steps=steps + 1, samples=None)
    batches, *_ = train(prefix, tmp_path, None, rows=4, steps=steps, samples=None)
    assert sum(map(len, batches.values())) == size


def test_reshuffling_is_rejected(prefix, tmp_path):
    with pytest.raises(DataError, match="train_sampling_strategy='group_by_length'"):
        train(prefix, tmp_path, None, rows=4, steps=2, train_sampling_strategy="group_by_length")

    def on_rank():
        from accelerate import Accelerator

        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(tp_size=2))
        accelerator = Accelerator(cpu=True)
        _, loader = accelerator.prepare(model, DataLoader(dataset_of(prefix), 4, shuffle=True))
        with pytest.raises(DataError, match="shuffles it again. Create it with shuffle=False"):
            next(iter(loader))
        loader = accelerator.prepare(DataLoader(dataset_of(prefix), 4))
        return next(iter(loader))["input_ids"].tolist()

    dataset = dataset_of(prefix)
    for rows in run_ranks(on_rank, 2):
        assert rows == [dataset[sample]["input_ids"].tolist() for sample in range(4)]


def make_stock_trainer(prefix, output, train_dataset=None, **options):
    model = AutoModelForCausalLM.from_pretrained(Path(prefix).parent / "model")
    arguments = TrainingArguments(str(output), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", **options)
    return Trainer(model, arguments, default_data_collator, train_dataset)


def test_double_label_shifts_are_rejected(prefix, tmp_path):
    trainer = make_stock_trainer(prefix, tmp_path, dataset_of(prefix))
    trainer.model_accepts_loss_kwargs = False
    with pytest.raises(DataError, match="takes no shift_labels"):
        trainer.train()
    with pytest.raises(DataError, match="label_smoothing_factor=0.1"):
        make_stock_trainer(prefix, tmp_path, dataset_of(prefix), label_smoothing_factor=0.1).train()
    with pytest.raises(DataError, match="label_smoothing_factor=0.1"):
        make_stock_trainer(prefix, tmp_path, label_smoothing_factor=0.1).evaluate(dataset_of(prefix))
    trainer = make_stock_trainer(prefix, tmp_path, dataset_of(prefix))
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.loss
    with pytest.raises(DataError, match="compute_loss_func is not supported, .* labels that are already shifted"):
        trainer.train()
    trainer = make_stock_trainer(prefix, tmp_path, dataset_of(prefix))
    trainer.data_collator = lambda rows: {
        name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")
    }
    with pytest.raises(DataError, match="collator drops shift_labels"):
        trainer.train()
    with pytest.raises(DataError, match="Subset wraps .* Pass the dataset itself; to leave out samples, use Without"):
        make_stock_trainer(prefix, tmp_path, Subset(dataset_of(prefix), range(8))).train()
    for dataset in (dataset_of(prefix), WithoutSamples(dataset_of(prefix), [(8, 48)])):
        trainer, recorder = make_stock_trainer(prefix, tmp_path, dataset), SampleRecorder()
        recorder.watch(trainer)
        trainer.add_callback(recorder)
        trainer.train()
        assert recorder.steps == {1: [dataset[sample]["input_ids"].tolist() for sample in range(8)]}


def test_prompt_tuning_with_shifted_labels_is_rejected(prefix, tmp_path):
    trainer = make_stock_trainer(prefix, tmp_path, dataset_of(prefix))
    adapter = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, adapter)
    with pytest.raises(DataError, match="PROMPT_TUNING: .* Use another adapter, such as LoRA or prefix tuning"):
        trainer.train()
    trainer = make_stock_trainer(prefix, tmp_path, dataset_of(prefix))
    adapter = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, adapter)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("part", [None, 6])
def test_evaluation_shifts_labels_once(prefix, tmp_path, part):
    """Evaluates a dataset that is passed to `evaluate`, and a subset of it."""
    dataset = dataset_of(prefix) if part is None else Subset(dataset_of(prefix), range(part))
    trainer = make_stock_trainer(prefix, tmp_path, per_device_eval_batch_size=len(dataset))
    batch = default_data_collator([dataset[number] for number in range(len(dataset))])
    with torch.no_grad():
        expected_loss = trainer.model.eval()(**batch).loss.item()
    assert trainer.evaluate(dataset)["eval_loss"] == pytest.approx(expected_loss, abs=1e-5)


def test_larger_batches_until_data_ends(prefix, tmp_path):
    """Resumes with a larger batch size; at the end fewer samples remain than a step needs."""
    size = len(dataset_of(prefix, None))
    train(prefix, tmp_path, None, rows=2, steps=21, stop=20, samples=None)
    left = (size - 40) // 8
    resume_options = {"rows": 4, "accumulate": 2, "samples": None, "resume": str(tmp_path / "checkpoint-20")}
    steps, *_ = train(prefix, tmp_path, None, steps=20 + left, **resume_options)
    planned = list_megatron_samples(prefix, 40, range(21, 21 + left), 1, 4, 2, samples=None)
    assert steps == {step: rows[0] for step, rows in planned.items()}
    with pytest.raises(DataError, match=f"it ends with step {20 + left}"):
        train(prefix, tmp_path, None, steps=21 + left, **resume_options)
    with pytest.raises(DataError, match=f"Set max_steps={20 + left}"):
        train(prefix, tmp_path, None, steps=-1, **resume_options)


def test_mismatched_schedules_are_rejected(prefix, tmp_path):
    trainer = make_stock_trainer(prefix, tmp_path, dataset_of(prefix), per_device_train_batch_size=4, weight_decay=0.01)
    for batch, samples, message in (
        (8, 0, "does not match the 4 samples of a step"),
        (4, 4, "does not match the 0 samples consumed"),
    ):
        trainer.create_optimizer()
        schedule = MegatronSchedule(1e-3, decay=100)
        trainer.lr_scheduler = MegatronScheduler(trainer.optimizer, schedule, batch, samples)
        with pytest.raises(DataError, match=message):
            trainer.train()


def test_blend_order(prefix, tmp_path):
    datasets = [dataset_of(prefix, 40, seed=seed) for seed in (1, 2)]
    blend = BlendedDataset(datasets, [0.3, 0.7], 20, cache=tmp_path)
    again = BlendedDataset(datasets, [0.3, 0.7], 20, cache=tmp_path)
    assert len(blend) == len(again) == 20
    assert blend.order.dataset[:10].tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert [blend[k]["input_ids"].tolist() for k in range(3)] == [
        datasets[one][sample]["input_ids"].tolist() for one, sample in ((1, 0), (0, 0), (1, 1))
    ]
    with pytest.raises(DataError, match="has .* samples, but"):
        BlendedDataset(datasets, [0.3, 0.7], 10_000)


def test_excluded_samples_after_resume(prefix, tmp_path, monkeypatch):
    """Excludes samples 12 to 16 after a stop at 8 samples; another run starts where Megatron-LM ended."""
    train(prefix, tmp_path, None, rows=4, steps=3, stop=2)
    dataset = dataset_of(prefix)
    rows = [dataset[sample]["input_ids"].tolist() for sample in range(30)]
    with monkeypatch.context() as patched:
        patched.setattr(
            "tests.integration.integrations.trainer.test_ordered_data.dataset_of",
            lambda *args: WithoutSamples(PretrainingDataset(prefix, LENGTH, SAMPLES, eod_token=0), [(12, 17)]),
        )
        steps, *_ = train(prefix, tmp_path, None, rows=4, steps=4, resume=str(tmp_path / "checkpoint-2"))
    assert steps == {3: rows[8:12], 4: rows[17:21]}
    dataset.seen = 6
    monkeypatch.setattr("tests.integration.integrations.trainer.test_ordered_data.dataset_of", lambda *args: dataset)
    steps, *_ = train(prefix, tmp_path / "other", None, rows=4, steps=2, accumulate=2)
    assert steps == {1: rows[6:14], 2: rows[14:22]}


def test_excluded_ranges(prefix):
    dataset = dataset_of(prefix)
    remaining = WithoutSamples(dataset, [(0, 2), (5, 6), (40, 48)])
    indices = [place for place in range(len(dataset)) if not (place < 2 or place == 5 or 40 <= place < 48)]
    assert (
        len(remaining) == len(indices)
        and [remaining.get_full_index(sample) for sample in range(len(remaining))] == indices
    )
    assert [remaining.sample_at(place) for place in indices] == list(range(len(indices)))
    assert remaining.sample_at(5) == remaining.sample_at(6)
    assert remaining[3]["input_ids"].tolist() == dataset[indices[3]]["input_ids"].tolist()
    for ranges in ([(5, 5)], [(5, 9), (7, 12)], [(0, 10_000)], [(-1, 2)]):
        with pytest.raises(DataError, match="expected .first, stop. in their order"):
            WithoutSamples(dataset, ranges)


class _SavesWithin(TrainerCallback):
    """Records states where stock saves on a signal: within a step, and after it before other callbacks."""

    def __init__(self):
        self.said = []

    def _save(self, args, state, control, **kwargs):
        [count] = [one for one in self.counting.callback_handler.callbacks if isinstance(one, SamplesCallback)]
        self.said.append((state.global_step, count.state()["attributes"]["consumed"]))

    on_pre_optimizer_step = on_step_end = on_substep_end = _save


def test_saves_within_a_step_count_completed_steps(prefix, tmp_path):
    trainer = make_stock_trainer(
        prefix, tmp_path, dataset_of(prefix), per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    trainer.args.max_steps = 2
    saves = _SavesWithin()
    saves.counting = trainer
    trainer.add_callback(saves)
    # Runs before user callbacks, as stock's own callback does.
    trainer.callback_handler.callbacks.insert(0, trainer.callback_handler.callbacks.pop())
    trainer.train()
    assert saves.said == [(0, 0)] * 3 + [(1, 6)] * 4 + [(2, 12)]


def test_files_with_equal_lengths_are_distinguished(prefix, tmp_path):
    places = [tmp_path / name / "pair" for name in "ab"]
    for seed, place in enumerate(places):
        drawn = random.Random(seed)
        with IndexedWriter(place, "uint16") as writer:
            for _ in range(30):
                writer.add_document([[drawn.randrange(1, 96) for _ in range(17)]])
        shutil.copytree(Path(prefix).parent / "model", place.parent / "model")
    train(str(places[0]), tmp_path / "out", None, rows=4, steps=3, stop=2, samples=None)
    with pytest.raises(DataError, match="files.data was"):
        train(str(places[1]), tmp_path / "out", None, rows=4, steps=4, samples=None,
              resume=str(tmp_path / "out" / "checkpoint-2"))  # fmt: skip


def test_blend_rejects_excluded_or_consumed_samples(prefix):
    dataset = dataset_of(prefix)
    with pytest.raises(DataError, match="A blend cannot contain datasets"):
        BlendedDataset([WithoutSamples(dataset, [(1, 3)]), dataset])
    remaining = WithoutSamples(dataset, [(1, 3)])
    dataset.seen = 10
    assert remaining.seen == 10
    with pytest.raises(DataError, match="A blend cannot contain datasets"):
        BlendedDataset([dataset])


RAMP_UP = BatchRampUp(8, start=2, increment=2, samples=12)
# Layout -> per-device batch size, and the layout that resumes; a single process can only resume its own checkpoints.
GROWING = {"one process": (2, "one process"), "dp2": (1, "tp2+dp2"), "cp2": (1, "dp2"), "pp2+dp2": (2, "dp4")}


def train_by_hand(prefix, ends):
    """Returns the losses of a single-process loop with growing batches."""
    model = AutoModelForCausalLM.from_pretrained(Path(prefix).parent / "model")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    dataset, losses = dataset_of(prefix), []
    for first, stop in itertools.pairwise([0, *ends]):
        loss = model(**default_data_collator([dataset[sample] for sample in range(first, stop)])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", GROWING)
def test_batch_ramp_up_matches_single_process(prefix, tmp_path, layout):
    """Another layout resumes while the batch size is still growing."""
    rows, other = GROWING[layout]
    sizes = RAMP_UP if layout != "pp2+dp2" else BatchRampUp(8, start=4, increment=4, samples=12)
    ends = [sizes.after(steps) for steps in range(1, 7)]
    options = {"ramp_up": sizes, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}

    def run(name, rows, **given):
        calls = 8 // rows // (LAYOUTS[name] or {}).get("dp_size", 1)
        ranks = ranks_of(LAYOUTS[name])
        return run_ranks(train, ranks, prefix, tmp_path, LAYOUTS[name], rows=rows, accumulate=calls, **given, **options)

    begun = run(layout, rows, steps=6, stop=3)
    went_on = run(other, 1, steps=6, resume=str(tmp_path / "checkpoint-3"))
    taken = {**given(begun), **given(went_on)}
    dataset = dataset_of(prefix)
    for step, (first, stop) in enumerate(itertools.pairwise([0, *ends]), 1):
        taken_rows = [row for replica in taken[step] for row in replica]
        assert sorted(taken_rows) == sorted(dataset[sample]["input_ids"].tolist() for sample in range(first, stop))
    # The last log entry of a stopped run is a summary.
    assert begun[0][2][:3] + went_on[0][2][3:] == pytest.approx(train_by_hand(prefix, ends), abs=2e-4)


def test_invalid_batch_ramp_ups_are_rejected(prefix, tmp_path):
    grow = {"steps": 6, "ramp_up": RAMP_UP}
    message = "must be multiples of 4, .*, got 2. Lower per_device_train_batch_size and raise gradient_accumulation"
    with pytest.raises(DataError, match=message):
        train(prefix, tmp_path, None, rows=4, accumulate=2, **grow)
    options = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    *_, losses = train(prefix, tmp_path, None, rows=2, accumulate=4, **grow, **options)
    assert losses == pytest.approx(train_by_hand(prefix, [RAMP_UP.after(steps) for steps in range(1, 7)]), abs=2e-4)
    with pytest.raises(DataError, match="does not match the batch size of 16 samples"):
        train(prefix, tmp_path, None, rows=2, accumulate=8, **grow)
    with pytest.raises(DataError, match="steps of growing size, which num_train_epochs cannot count"):
        train(prefix, tmp_path, None, rows=2, accumulate=4, **{**grow, "steps": -1})
    size = len(dataset_of(prefix, None))
    last = RAMP_UP.full_steps(0, size)
    with pytest.raises(DataError, match=f"it ends with step {last}"):
        train(prefix, tmp_path, None, rows=2, accumulate=4, samples=None, **{**grow, "steps": last + 1})


SPECIAL_TOKENS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[EOS]",
    *(f"<extra_id_{number}>" for number in range(9)),
]


MASKED_MODELS = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}


def make_masked_data(prefix, kind):
    """Returns a model config and a dataset of masked sentences."""
    words = [*SPECIAL_TOKENS, *(f"word{number}" for number in range(96 - len(SPECIAL_TOKENS)))]
    tokenizer = BertTokenizer({word: number for number, word in enumerate(words)}, eos_token="[EOS]")
    if kind == "t5":
        config = T5Config(
            vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )  # fmt: skip
        return config, T5Dataset(prefix, 32, 24, 32, tokenizer=tokenizer)
    config = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return config, BertDataset(prefix, 32, 32, tokenizer=tokenizer, pairs=False)


def train_masked(prefix, output, sizes, kind, accumulate=2, is_scaled=None, ramp_up=None, resume=None, **options):
    _, dataset = make_masked_data(prefix, kind)
    layout = {} if sizes is None else {"megatron_config": MegatronConfig(**sizes)}
    model = MASKED_MODELS[kind].from_pretrained(output / "model", **layout)
    arguments = TrainingArguments(
        str(output),
        per_device_train_batch_size=8 // accumulate // (sizes or {}).get("dp_size", 1),
        gradient_accumulation_steps=accumulate,
        report_to=[],
        use_cpu=True,
        **{"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"} | options,
    )
    dataset.ramp_up = ramp_up
    trainer, recorder = Trainer(model, arguments, default_data_collator, dataset), SampleRecorder()
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        recorder._ids += inputs["input_ids"].tolist()
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss, trainer.loss_is_scaled_for_ga = compute_loss, is_scaled
    trainer.train(resume_from_checkpoint=resume)
    return recorder._ids, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def write_sentences(tmp_path, kind):
    """Writes documents of sentences and a model; returns the prefix and the masked dataset."""
    drawn, prefix = random.Random(0), tmp_path / "text_sentence"
    with IndexedWriter(prefix, "uint16") as writer:
        for _ in range(30):
            count = drawn.randrange(1, 5)
            writer.add_document(
                [[drawn.randrange(15, 96) for _ in range(drawn.randrange(1, 20))] for _ in range(count)]
            )
    config, dataset = make_masked_data(prefix, kind)
    torch.manual_seed(0)
    MASKED_MODELS[kind].from_config(config).save_pretrained(tmp_path / "model")
    return prefix, dataset


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_masked_sentences_train_identically(tmp_path, kind):
    """Samples differ in their number of masked tokens, and so do replicas."""
    prefix, dataset = write_sentences(tmp_path, kind)
    [(taken_rows, losses)] = run_ranks(train_masked, 1, prefix, tmp_path, None, kind)
    assert taken_rows == [dataset[sample]["input_ids"].tolist() for sample in range(32)]
    assert len(losses) == 4
    for layout in ("dp2", "tp2+dp2"):
        ranks = run_ranks(train_masked, ranks_of(LAYOUTS[layout]), prefix, tmp_path, LAYOUTS[layout], kind)
        assert sorted(ranks[0][0] + ranks[-1][0]) == sorted(taken_rows)
        assert ranks[0][1] == pytest.approx(losses, abs=2e-4)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_losses_summed_over_microbatches_are_rejected(tmp_path, kind):
    """Applies when the number of microbatches per step changes: with ramp-up, or after a resume."""
    prefix, _ = write_sentences(tmp_path, kind)
    grow = {"ramp_up": BatchRampUp(8, start=4, increment=4, samples=4)}
    for layout in ("one process", "dp2", "pp2+dp2"):
        sizes = LAYOUTS[layout]
        if kind == "t5" and layout == "pp2+dp2":
            continue
        run = [ranks_of(sizes), prefix, tmp_path / layout, sizes, kind]
        shutil.copytree(tmp_path / "model", tmp_path / layout / "model")
        with pytest.raises(RankError, match="Set trainer.loss_is_scaled_for_ga = False, so that Trainer averages them"):
            run_ranks(train_masked, *run, **grow)
        [(_, means), *_] = run_ranks(train_masked, *run, **grow, is_scaled=False)
        assert max(means) < 1.6 * min(means)
    run = [2, prefix, tmp_path / "dp2", LAYOUTS["dp2"], kind]
    run_ranks(train_masked, *run, max_steps=2, save_strategy="steps", save_steps=2)
    resume_options = {"resume": str(tmp_path / "dp2" / "checkpoint-2"), "accumulate": 4}
    with pytest.raises(RankError, match="loss_is_scaled_for_ga"):
        run_ranks(train_masked, *run, **resume_options)
    [(ids, _), _] = run_ranks(train_masked, *run, **resume_options, is_scaled=False)
    assert len(ids) == 8


def test_ramp_up_rejects_losses_without_num_items(prefix, tmp_path):
    trainer = make_stock_trainer(
        prefix, tmp_path, dataset_of(prefix), per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    trainer.args.max_steps, trainer.train_dataset.ramp_up = 3, RAMP_UP
    trainer.compute_loss = lambda model, inputs, num_items_in_batch=None: model(**inputs).loss
    with pytest.raises(DataError, match="LlamaForCausalLM ignores num_items_in_batch"):
        trainer.train()
    trainer.compute_loss = lambda model, inputs, num_items_in_batch=None: (
        model(**inputs, num_items_in_batch=num_items_in_batch).loss
    )
    trainer.train()
    assert trainer.state.global_step == 3


def train_with_a_skip(prefix, output, resume, steps):
    model = AutoModelForCausalLM.from_pretrained(
        Path(prefix).parent / "model", megatron_config=MegatronConfig(dp_size=2)
    )
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=steps, save_steps=3,
        report_to=[], use_cpu=True, weight_decay=0.01, logging_steps=1, learning_rate=1e-3, max_grad_norm=0.0,
    )  # fmt: skip
    dataset = dataset_of(prefix)
    dataset.ramp_up = RAMP_UP
    trainer = Trainer(model, arguments, default_data_collator, dataset)
    original = trainer.compute_loss
    # The loss of the second step is NaN, as after an overflow.
    trainer.compute_loss = lambda *args, **kwargs: (
        original(*args, **kwargs) * (float("nan") if trainer.state.global_step == 1 else 1.0)
    )
    trainer.create_optimizer()
    trainer.lr_scheduler = scheduler = MegatronScheduler(
        trainer.optimizer, MegatronSchedule(1e-3, decay=100, end_weight_decay=0.01), RAMP_UP
    )
    trainer.train(resume_from_checkpoint=resume)
    [count] = [one for one in trainer.callback_handler.callbacks if isinstance(one, SamplesCallback)]
    return count.consumed, scheduler.samples


def test_skipped_steps_do_not_advance_the_schedule(prefix, tmp_path):
    """As in Megatron-LM, samples of a skipped step are consumed but not scheduled, also after a resume."""
    # Batch sizes 2 2 4 | 6 8; the second step is skipped.
    assert run_ranks(train_with_a_skip, 2, prefix, tmp_path, None, 3)[0] == (8, 6)
    resume = str(tmp_path / "checkpoint-3")
    assert run_ranks(train_with_a_skip, 2, prefix, tmp_path, resume, 5)[0] == (22, 20)


def test_ramp_up_rejects_router_losses(prefix, tmp_path):
    config = MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
    )  # fmt: skip
    trainer = make_stock_trainer(
        prefix, tmp_path, dataset_of(prefix), per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    trainer.model = trainer.model_wrapped = AutoModelForCausalLM.from_config(config)
    trainer.train_dataset.ramp_up = RAMP_UP
    with pytest.raises(DataError, match="router losses .* Set router_aux_loss_coef to 0, or keep the number"):
        trainer.train()
    config.router_aux_loss_coef = 0.0
    trainer.train()

"""Tests of runs that are killed at random times, during saves too, and resume at the next sample on other layouts."""

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.parallel_state import parallel_state
from tests.integration.integrations.trainer.test_ordered_data import LAYOUTS, dataset_of, prefix, ranks_of

__all__ = ["prefix"]

# Layout, samples per call of a replica, calls per step.
PARTS = [("tp2", 4, 1), ("dp2", 1, 2), ("tp2+dp2", 2, 1), ("dp4", 1, 1), ("cp2", 1, 2), ("dp2", 2, 1)]
STEPS, SAMPLES = 12, 96


class SampleRecorder(TrainerCallback):
    """Writes the samples of a replica at the end of each step."""

    def __init__(self, path, part):
        self.path, self.part, self.ids = path, part, []

    def on_step_end(self, args, state, control, **kwargs):
        with open(self.path, "a") as file:
            file.write(json.dumps([state.global_step, self.part, self.ids]) + "\n")
        self.ids = []


def train(prefix, folder, part, name, rows, calls, seconds):
    model = AutoModelForCausalLM.from_pretrained(
        Path(prefix).parent / "model", megatron_config=MegatronConfig(**LAYOUTS[name])
    )
    state = parallel_state(model)
    recorder = SampleRecorder(folder / f"replica{state.mesh.dp_rank}", part)
    arguments = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=rows, gradient_accumulation_steps=calls, max_steps=STEPS,
        save_strategy="steps", save_steps=1, save_total_limit=2, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, default_data_collator, dataset_of(prefix, SAMPLES), callbacks=[recorder])
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        recorder.ids += inputs["input_ids"].tolist()
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    if seconds is not None:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    done = any((folder / "out").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if done else None)
    return trainer.state.global_step


@pytest.mark.parametrize("seed", range(4))
def test_killed_runs_read_each_sample_once(prefix, tmp_path, seed):
    rng, killed = random.Random(seed), 0
    parts = rng.sample(PARTS, len(PARTS))
    for part, (name, rows, calls) in enumerate(parts):
        seconds = None if part == len(parts) - 1 else rng.uniform(0.1, 0.6)
        try:
            finished = run_ranks(
                train, ranks_of(LAYOUTS[name]), prefix, tmp_path, part, name, rows, calls, seconds
            )  # fmt: skip
        except RankError:
            assert seconds is not None
            killed += 1
            continue
        assert set(finished) == {STEPS}
        break
    assert killed
    # If a step ran twice, its last run is the one that the final weights include.
    replicas = {int(path.name[len("replica") :]): path for path in tmp_path.glob("replica*")}
    lines = [(replica, *json.loads(line)) for replica, path in replicas.items() for line in path.open()]
    samples = []
    for step in range(1, STEPS + 1):
        last = max(part for _, number, part, _ in lines if number == step)
        step_ids = {replica: ids for replica, number, part, ids in lines if (number, part) == (step, last)}
        name, rows, calls = parts[last]
        assert sorted(step_ids) == list(range(LAYOUTS[name].get("dp_size", 1)))
        # Each rank of a replica writes the same line.
        blocks = {
            replica: [ids[at : at + rows] for at in range(0, len(ids), rows)] for replica, ids in step_ids.items()
        }
        samples += [row for call in range(calls) for replica in sorted(blocks) for row in blocks[replica][call]]
    dataset = dataset_of(prefix, SAMPLES)
    assert samples == [dataset[sample]["input_ids"].tolist() for sample in range(len(samples))]

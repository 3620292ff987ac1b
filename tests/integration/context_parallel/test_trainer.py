"""Tests of stock Trainer under context parallelism: logs, weights, evaluation, generation and resuming."""

import functools
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from hf_megatron import MegatronConfig, RankError
from hf_megatron.core.fork_harness import run_ranks

OPTIONS = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "save_strategy": "steps",
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
LAYOUTS = {
    "cp2": {"cp_size": 2},
    "cp2, a ring": {"cp_size": 2, "cp_comm_type": "p2p"},
    "cp2+pp2": {"cp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "cp2, stage 3": {"cp_size": 2, "zero_stage": 3},
}
LOGGED = ("loss", "grad_norm", "eval_loss", "learning_rate", "step")


def make_dataset(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 64, (length,), generator=generator).tolist()} for length in lengths]


def collate(batch):
    """Pads on the right; a sequence may have fewer tokens than there are context-parallel ranks."""
    longest = max(len(row["input_ids"]) for row in batch)
    tensors = {name: torch.full((len(batch), longest), fill) for name, fill in (("input_ids", 0), ("labels", -100))}
    tensors["attention_mask"] = torch.zeros_like(tensors["input_ids"])
    for sample_idx, row in enumerate(batch):
        tokens = torch.tensor(row["input_ids"])
        for name, values in (("input_ids", tokens), ("labels", tokens), ("attention_mask", torch.ones_like(tokens))):
            tensors[name][sample_idx, : len(tokens)] = values
    return tensors


def train(source, output, layout, resume=None, **options):
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=layout)
    trainer = Trainer(
        model,
        TrainingArguments(str(output), **OPTIONS | options),
        train_dataset=make_dataset(40, 0),
        eval_dataset=make_dataset(7, 1),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    model.eval()
    prompt = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    with torch.no_grad():
        text = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        beams = model.generate(prompt, max_new_tokens=4, num_beams=2, do_sample=False, pad_token_id=0)
        torch.manual_seed(3)
        samples = model.generate(prompt, max_new_tokens=4, do_sample=True, pad_token_id=0)
        logits = model(input_ids=prompt).logits
    prediction = trainer.predict(make_dataset(5, 2))
    model.save_pretrained(output / "final")
    logs = [{name: entry[name] for name in LOGGED if name in entry} for entry in trainer.state.log_history]
    texts = [text.tolist(), beams.tolist(), samples.tolist()]
    return logs, texts, logits, torch.tensor(prediction.predictions), prediction.metrics["test_loss"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context") / "model"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(source):
    output = source.parent / "alone"
    return train(source, output, None), load_file(output / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def shared(source):
    """Checkpoint folder written by two ranks, and the results of each rank."""
    output = source.parent / "shared"
    return output, run_ranks(functools.partial(train, source, output, MegatronConfig(**LAYOUTS["cp2"])), 2)


def require_close(found, expected):
    logs, texts, *tensors = found
    for entry, other in zip(logs, expected[0], strict=True):
        assert entry == pytest.approx(other, rel=2e-5, abs=1e-6)
    assert texts == expected[1]
    for value, other in zip(tensors, expected[2:], strict=True):
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(other), rtol=1e-3, atol=2e-4)


def require_weights(folder, expected):
    for name, weight in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_run_matches_single_process(shared, alone):
    output, results = shared
    for one in results:
        require_close(one, alone[0])
    require_weights(output / "final", alone[1])


@pytest.mark.parametrize("name", list(LAYOUTS)[1:])
def test_other_layouts(source, alone, tmp_path, name):
    layout = MegatronConfig(**LAYOUTS[name])
    ranks = layout.cp_size * layout.pp_size
    for one in run_ranks(functools.partial(train, source, tmp_path, layout), ranks):
        require_close(one, alone[0])
    require_weights(tmp_path / "final", alone[1])


@pytest.mark.parametrize(
    ("ranks", "fields"), [(4, {"cp_size": 4, "cp_comm_type": "p2p"}), (2, {"tp_size": 2}), (1, None)]
)
def test_checkpoint_resumes_with_any_layout(source, shared, alone, tmp_path, ranks, fields):
    shutil.copytree(shared[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    layout = None if fields is None else MegatronConfig(**fields)
    run = functools.partial(train, source, tmp_path, layout, tmp_path / "checkpoint-3")
    results = [run()] if layout is None else run_ranks(run, ranks)
    for one in results:
        assert [entry["step"] for entry in one[0]] == [entry["step"] for entry in alone[0][0]]
        for entry, other in zip(one[0], alone[0][0], strict=True):
            assert entry == pytest.approx(other, rel=2e-5, abs=1e-6)
    require_weights(tmp_path / "final", alone[1])


class KillAtStep(TrainerCallback):
    """Kills this process with SIGKILL, like the OOM killer, in the step after the last checkpoint."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(source, output):
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=MegatronConfig(**LAYOUTS["cp2"]))
    arguments = TrainingArguments(str(output), **OPTIONS)
    trainer = Trainer(
        model, arguments, train_dataset=make_dataset(40, 0), eval_dataset=make_dataset(7, 1), data_collator=collate
    )
    trainer.add_callback(KillAtStep())
    trainer.train()


@pytest.mark.parametrize(("ranks", "fields"), [(4, {"cp_size": 4, "cp_comm_type": "p2p"}), (1, None)])
def test_killed_run_resumes_with_another_cp_size(source, alone, tmp_path, ranks, fields):
    with pytest.raises(RankError):
        run_ranks(functools.partial(train_until_killed, source, tmp_path), 2)
    assert (tmp_path / "checkpoint-3").is_dir()
    layout = None if fields is None else MegatronConfig(**fields)
    run = functools.partial(train, source, tmp_path, layout, True)
    for one in [run()] if layout is None else run_ranks(run, ranks):
        for entry, other in zip(one[0], alone[0][0], strict=True):
            assert entry == pytest.approx(other, rel=2e-5, abs=1e-6)
    require_weights(tmp_path / "final", alone[1])


def test_thirty_steps(source, tmp_path):
    """Rounding differences between the layouts stay small over a run."""
    options = {"max_steps": 30, "eval_steps": 10, "save_strategy": "no", "learning_rate": 1e-3}
    expected = train(source, tmp_path / "alone", None, **options)
    layout = MegatronConfig(**LAYOUTS["cp2"])
    for result in run_ranks(functools.partial(train, source, tmp_path / "shared", layout, **options), 2):
        require_close(result, expected)

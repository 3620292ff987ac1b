"""Tests of calls that one rank of a replica makes alone: every rank ends in seconds, with the call and the line."""

import re

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_megatron
from hf_megatron import MegatronConfig
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.core.communication import diverged_calls
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.runtime import RUNTIME
from hf_megatron.integrations.accelerate.launched_script import Launch
from hf_megatron.parallel_state import parallel_state
from tests.faults.core.communication.test_watchdog import BUSY_SECONDS, Job, print_fault

LONG = 300.0
TP2 = MegatronConfig(tp_size=2, timeout=LONG)
PP2 = MegatronConfig(pp_size=2, timeout=LONG)


@pytest.fixture
def start(tmp_path):
    jobs = []

    def function(name, *args, world_size=2):
        jobs.append(Job(tmp_path / name, world_size, *args))
        return jobs[-1]

    yield function
    for job in jobs:
        job.kill()


class OnRanks(TrainerCallback):
    def __init__(self, act, ranks=(0,)):
        self.act, self.ranks = act, ranks

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if dist.get_rank() in self.ranks:
            print_fault()
            self.act(model)


def make_trainer(path, folder, layout, callbacks=()):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout)
    samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(8 * 8).reshape(8, 8) % 64]
    args = TrainingArguments(
        str(folder), max_steps=2, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    )
    return Trainer(model, args, train_dataset=samples, eval_dataset=samples, callbacks=list(callbacks))


def generate_in_callback(path, folder, layout, ranks=(0,)):
    texts = []

    def act(model):
        texts.append(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).tolist())

    make_trainer(path, folder, layout, [OnRanks(act, ranks)]).train()
    return texts


def save_in_callback(path, folder, layout):
    make_trainer(path, folder, layout, [OnRanks(lambda model: model.save_pretrained(folder / "saved"))]).train()


def evaluate_before_training(path, folder, layout):
    trainer = make_trainer(path, folder, layout)
    if dist.get_rank() == 0:
        print_fault()
        trainer.evaluate()
    trainer.train()


def load_again(path, folder, layout):
    make_trainer(path, folder, layout)
    if dist.get_rank() == 0:
        print_fault()
        AutoModelForCausalLM.from_pretrained(path, megatron_config=layout)
    dist.barrier()


def take_state_dict(path, folder, layout):
    trainer = make_trainer(path, folder, layout)
    trainer.train()
    if dist.get_rank() == 0:
        print_fault()
        trainer.model.state_dict()
    dist.barrier()


def resize(path, folder, layout):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout)
    if dist.get_rank() == 0:
        print_fault()
        model.resize_token_embeddings(model.config.vocab_size + 8)
    dist.barrier()


CASES = {
    "generate": (generate_in_callback, TP2),
    "save_pretrained": (save_in_callback, PP2),
    "evaluate": (evaluate_before_training, PP2),
    "from_pretrained": (load_again, TP2),
    "state_dict": (take_state_dict, TP2),
    "resize_token_embeddings": (resize, TP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CASES)
def test_call_on_one_rank_ends_job(tiny, tmp_path, start, call):
    function, layout = CASES[call]
    job = start(call, function, tiny, tmp_path, layout)
    assert job.wait(4 * BUSY_SECONDS) == {0: 1, 1: 1}, (job.text(0), job.text(1))
    line = r"test_diverged_calls\.py:\d+"
    for rank in (0, 1):
        # One heartbeat later than the limit for idle cores.
        assert job.seconds_after_fault(rank) < 10.0 + BUSY_SECONDS
        last = job.text(rank).strip().splitlines()[-1]
        assert re.search(rf"rank 0 in {call}\(\) \({line}\), rank 1 in \w+\(\) \({line}\)", last), job.text(rank)
        assert f"Call {call}() on every rank" in last


@pytest.mark.slow
def test_messages_of_other_ranks_do_not_delay_the_end(tiny, tmp_path, start):
    """On tp2 x pp2, ranks of the second stage wait for the first one, of which one rank generates alone."""
    layout = MegatronConfig(tp_size=2, pp_size=2, timeout=LONG)
    job = start("generate", generate_in_callback, tiny, tmp_path, layout, world_size=4)
    assert job.wait(6 * BUSY_SECONDS) == dict.fromkeys(range(4), 1), job.text(0)
    for rank in range(4):
        assert job.seconds_after_fault(0) < 10.0 + 2 * BUSY_SECONDS
        assert "Call generate() on every rank" in job.text(rank).strip().splitlines()[-1]


def test_call_on_every_rank_works(tiny, tmp_path):
    """Follows the error's advice: every rank generates, and one may use the result."""
    first, second = run_ranks(generate_in_callback, 2, tiny, tmp_path, TP2, (0, 1))
    assert first == second and len(first) == 2


def raise_in_callback(path, folder, layout):
    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if dist.get_rank() == 1:
                print_fault()
                raise ValueError("boom in a callback")

    make_trainer(path, folder, layout, [Broken()]).train()


def raise_in_stage(path, folder, layout):
    trainer = make_trainer(path, folder, layout)

    def fail(*args):
        if trainer.state.global_step == 1:
            print_fault()
            raise ValueError("boom in a stage")

    if dist.get_rank() == 1:
        trainer.model.model.norm.register_forward_pre_hook(fail)
    trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("function", [raise_in_callback, raise_in_stage])
def test_first_error_is_printed_last_on_pipeline_ranks(tiny, tmp_path, start, function):
    job = start("first", function, tiny, tmp_path, PP2)
    assert job.wait(4 * BUSY_SECONDS) == {0: 1, 1: 1}, (job.text(0), job.text(1))
    for rank in (0, 1):
        assert "ValueError: boom in a" in job.text(rank).strip()[-500:], job.text(rank)
        assert "lost the connection" not in job.text(rank)
        assert job.seconds_after_fault(rank) < 20.0 + BUSY_SECONDS


@pytest.mark.slow
def test_seeded_fault_calls_are_not_compared(tiny, tmp_path, start, monkeypatch):
    """Without the comparison the ranks are still waiting after the limit."""
    monkeypatch.setattr(diverged_calls, "COLLECTIVE_CALLS", frozenset())
    job = start("generate", generate_in_callback, tiny, tmp_path, TP2)
    job.wait_for("FAULT", 0, 4 * BUSY_SECONDS)
    assert job.wait(15.0) == {0: None, 1: None}


def test_one_rank_loads_unsharded_model(tiny):
    """Follows the error's advice in a launched script: rank 0 alone loads a stock model."""

    def on_rank():
        PATCH_REGISTRY.activate()
        RUNTIME.launch = Launch(MegatronConfig(tp_size=2))
        parallelized = AutoModelForCausalLM.from_pretrained(tiny)
        count = None
        if dist.get_rank() == 0:
            with hf_megatron.load_unsharded():
                stock = AutoModelForCausalLM.from_pretrained(tiny)
            assert parallel_state(stock) is None
            count = sum(parameter.numel() for parameter in stock.parameters())
        assert parallel_state(AutoModelForCausalLM.from_pretrained(tiny)) is not None
        return parallel_state(parallelized) is not None, count

    stock = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(tiny).parameters())
    assert run_ranks(on_rank, 2) == [(True, stock), (True, None)]

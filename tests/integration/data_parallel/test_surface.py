"""Tests of the public model API with data parallelism."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron import MegatronConfig, RankError, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import (
    backward,
    clone_parameters,
    count_ranks,
    gather_gradients,
    gather_weights,
    load_model,
    parameters_unchanged,
    parse_layout,
)

STAGES = ["dp2", "dp2+zero3", "tp2+dp2+zero0", "tp2+dp2+zero1", "tp2+dp2+zero3"]


def are_equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("text", STAGES)
def test_saved_files_match_source(stories, tmp_path, text):
    run_ranks(
        lambda: load_model(stories, parse_layout(text)).save_pretrained(tmp_path), count_ranks(parse_layout(text))
    )
    assert are_equal(load_file(tmp_path / "model.safetensors"), load_file(stories / "model.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".tmp"]


@pytest.mark.parametrize("text", STAGES)
def test_accelerate_state_dict_is_full_on_rank_zero(stories, text):
    def on_rank():
        model = load_model(stories, parse_layout(text))
        accelerator = Accelerator(cpu=True)
        return accelerator.get_state_dict(accelerator.prepare(model))

    assert are_equal(run_ranks(on_rank, count_ranks(parse_layout(text)))[0], load_model(stories).state_dict())


@pytest.mark.parametrize("text", STAGES)
def test_generate_with_different_prompts_per_dp_rank(stories, text):
    """Generates different lengths: with ZeRO-3, a finished rank must continue until the other ranks finish."""
    prompts, lengths = [[1, 403, 407, 261], [1, 410]], [5, 21]

    def generate(model, rank):
        tokens = torch.tensor([prompts[rank]])
        return model.eval().generate(tokens, max_new_tokens=lengths[rank], do_sample=False)

    def on_rank():
        model = load_model(stories, parse_layout(text))
        rank = parallel_state(model).mesh.dp_rank
        return rank, generate(model, rank)

    expected = [generate(load_model(stories), rank) for rank in (0, 1)]
    for rank, tokens in run_ranks(on_rank, count_ranks(parse_layout(text))):
        assert torch.equal(tokens, expected[rank])


def test_unsynced_generate_is_detected(stories):
    """Seeded fault: one rank finishes while the other still gathers weights."""

    def on_rank():
        model, rank = load_model(stories, parse_layout("dp2+zero3")).eval(), dist.get_rank()
        model.generate(torch.tensor([[1, 403]]), max_new_tokens=3 + 5 * rank, do_sample=False, synced_gpus=False)

    with pytest.raises(RankError):
        run_ranks(on_rank, 2)


def test_random_init_is_layout_independent(stories):
    source = AutoConfig.from_pretrained(stories)

    def on_rank(text, seed=3):
        torch.manual_seed(dist.get_rank())
        values = parse_layout(text).to_dict() | {"seed": seed}
        return gather_weights(AutoModelForCausalLM.from_config(source, megatron_config=MegatronConfig(**values)))

    expected = run_ranks(on_rank, 2, "tp2")[0]
    for text in STAGES:
        for tensors in run_ranks(on_rank, count_ranks(parse_layout(text)), text):
            assert not tensors or are_equal(tensors, expected), text
    assert not are_equal(run_ranks(on_rank, 2, "dp2", seed=4)[0], expected)


def test_deep_copy_is_independent_and_evaluates(stories):
    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        duplicate = copy.deepcopy(model)
        before = clone_parameters(duplicate)
        backward(model)
        duplicate.zero_grad()
        assert all(gradient is not None for gradient in gather_gradients(model).values())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert parameters_unchanged(duplicate, before)
        return duplicate.eval()(input_ids=torch.tensor([[1, 403, 407]])).logits.detach()

    expected = load_model(stories)(input_ids=torch.tensor([[1, 403, 407]])).logits
    for logits in run_ranks(on_rank, 2):
        torch.testing.assert_close(logits, expected)


def test_training_deep_copy_is_rejected(stories):
    def on_rank():
        duplicate = copy.deepcopy(load_model(stories, parse_layout("dp2")))
        with pytest.raises(UnsupportedError, match="deep copy"):
            backward(duplicate)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("text", ["dp2+zero0", "dp2", "dp2+zero2"])
def test_one_rank_evaluates_alone(stories, text):
    def on_rank():
        model = load_model(stories, parse_layout(text))
        backward(model)
        loss = 0.0
        if dist.get_rank() == 0:
            with torch.no_grad():
                ids = torch.tensor([[1, 403, 407, 261]])
                loss = model.eval()(input_ids=ids, labels=ids).loss.item()
        model.train()
        backward(model)
        return loss, gather_gradients(model).keys() == dict(model.named_parameters()).keys()

    ids = torch.tensor([[1, 403, 407, 261]])
    expected = load_model(stories)(input_ids=ids, labels=ids).loss.item()
    assert run_ranks(on_rank, 2) == [(pytest.approx(expected, rel=1e-5), True), (0.0, True)]


def test_zero_grad_with_zero_stage_3(stories):
    def on_rank():
        model = load_model(stories, parse_layout("dp2+zero3"))
        backward(model)
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
        return all(parameter.grad is None for parameter in model.parameters())

    assert run_ranks(on_rank, 2) == [True, True]


def read_anonymous_bytes():
    """Returns the anonymous resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure_loading_memory(path):
    before = read_anonymous_bytes()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(dp_size=2, zero_stage=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(1.0)
    return read_anonymous_bytes() - before


def test_zero_stage_3_loads_local_shards_only(tmp_path):
    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=8192)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    for used_bytes in run_ranks(measure_loading_memory, 2, tmp_path):
        assert used_bytes < 0.5 * size + 2**25 + 100 * 2**20

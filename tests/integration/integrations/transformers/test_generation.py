"""Tests of generate() under tensor parallelism: greedy tokens match a single process, ranks sample identically."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks

LAYOUTS = ["tp2", "tp2+sp", "tp4", "tp8"]


def parse_layout(name):
    return MegatronConfig(tp_size=int(name[2]), sequence_parallel=name.endswith("+sp"))


def tokenize_prompts(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(["Once upon a time", "Lily and Tom went to the big park. They"], return_tensors="pt", padding=True)


def generate(stories, config, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    return model.generate(**tokenize_prompts(stories), max_new_tokens=24, **kwargs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_matches_single_process(stories, name):
    expected = generate(stories, None, do_sample=False)
    for tokens in run_ranks(generate, parse_layout(name).tp_size, stories, parse_layout(name), do_sample=False):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("kwargs", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_caches_and_beams_match_single_process(stories, kwargs):
    expected = generate(stories, None, do_sample=False, **kwargs)
    for tokens in run_ranks(generate, 2, stories, parse_layout("tp2"), do_sample=False, **kwargs):
        assert torch.equal(tokens, expected)


def test_sampling_is_identical_across_ranks(stories):
    def sample():
        set_seed(torch.distributed.get_rank())
        return generate(stories, parse_layout("tp2"), do_sample=True, top_k=0), generate(
            stories, parse_layout("tp2"), do_sample=True
        )

    first, second = run_ranks(sample, 2)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[0].shape != first[1].shape or not torch.equal(first[0], first[1])

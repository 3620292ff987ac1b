"""generate() under tensor parallelism: greedy equals one process, sampling is the same on every rank."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks

LAYOUTS = ["tp2", "tp2+sp", "tp4", "tp8"]


def layout(name):
    return MegatronConfig(tp_size=int(name[2]), sequence_parallel=name.endswith("+sp"))


def inputs(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(["Once upon a time", "Lily and Tom went to the big park. They"], return_tensors="pt", padding=True)


def generate(stories, config, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    return model.generate(**inputs(stories), max_new_tokens=24, **kwargs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_equals_one_process(stories, name):
    expected = generate(stories, None, do_sample=False)
    for found in run_ranks(generate, layout(name).tp_size, stories, layout(name), do_sample=False):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kwargs", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_caches_and_beams_equal_one_process(stories, kwargs):
    expected = generate(stories, None, do_sample=False, **kwargs)
    for found in run_ranks(generate, 2, stories, layout("tp2"), do_sample=False, **kwargs):
        assert torch.equal(found, expected)


def test_sampling_is_equal_across_ranks_whatever_the_seeds(stories):
    def sample():
        set_seed(torch.distributed.get_rank())
        return generate(stories, layout("tp2"), do_sample=True, top_k=0), generate(
            stories, layout("tp2"), do_sample=True
        )

    first, second = run_ranks(sample, 2)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[0].shape != first[1].shape or not torch.equal(first[0], first[1])

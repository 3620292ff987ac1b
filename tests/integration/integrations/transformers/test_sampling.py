"""Tests that seeded `generate(do_sample=True)` calls match a single process in tokens and in the final RNG state."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.dp_training import count_ranks

LAYOUTS = {
    "tp2": ConfigUnderTest(tp_size=2),
    "tp2+sp": ConfigUnderTest(tp_size=2, sequence_parallel=True),
    "pp2": ConfigUnderTest(pp_size=2),
    "tp2+pp2": ConfigUnderTest(tp_size=2, pp_size=2),
}
WAYS = {
    "plain": {"top_k": 0},
    "filters": {"top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "several": {"num_return_sequences": 2},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
}


def tokenize_prompts(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(["Once upon a time", "Lily and Tom went to the big park. They"], return_tensors="pt", padding=True)


def make_assistant(stories):
    model = AutoModelForCausalLM.from_pretrained(stories)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def sample(stories, config):
    """Returns the tokens of three calls after one seed and the resulting RNG state, for each way of sampling."""
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    prompt, assistant = tokenize_prompts(stories), make_assistant(stories)
    one_prompt = {name: value[1:] for name, value in prompt.items()}
    outputs = {}
    for way, kwargs in (WAYS | {"assistant": {"assistant_model": assistant}}).items():
        # Only the seed of rank 0 takes effect.
        set_seed(11 + (dist.get_rank() if dist.is_initialized() else 0))
        kwargs = (one_prompt if way == "assistant" else prompt) | kwargs
        calls = [model.generate(**kwargs, max_new_tokens=8, do_sample=True) for _ in range(3)]
        outputs[way] = [*calls, torch.get_rng_state()]
    return outputs


@pytest.fixture(scope="module")
def one_process(stories):
    return sample(stories, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_tokens_match_single_process(stories, one_process, layout):
    assert not torch.equal(*one_process["plain"][:2])
    for outputs in run_ranks(sample, count_ranks(LAYOUTS[layout]), stories, LAYOUTS[layout]):
        for way, expected in one_process.items():
            assert all(map(torch.equal, outputs[way], expected)), way


def test_dp_ranks_sample_independently(stories):
    """Data-parallel ranks keep their own batch, seed and RNG state, as separate processes do."""

    def on_rank(config=None, rank=None):
        rank = dist.get_rank() if rank is None else rank
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
        set_seed(11 + rank)
        prompt = {name: value[rank : rank + 1] for name, value in tokenize_prompts(stories).items()}
        return model.generate(**prompt, max_new_tokens=8, do_sample=True)

    for rank, tokens in enumerate(run_ranks(on_rank, 2, ConfigUnderTest(dp_size=2))):
        assert torch.equal(tokens, on_rank(rank=rank))

"""Mixers whose heads the ranks of a row share, against one process."""

import functools

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.context_parallel import head_blocks
from hf_megatron.context_parallel.attention import ContextGroups
from hf_megatron.integrations.gate import ConfigUnderTest
from hf_megatron.verify.parity import check_twin
from tests.shared_twins import make_twin

TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen4_exp_text",
    "olmo_hybrid",
    "nemotron_h",
    "minimax",
    "kimi_linear",
    "bailing_hybrid",
)
LAYOUTS = {
    "cp2, a ring": {"cp_comm_type": "p2p"},
    "cp2, heads": {"cp_comm_type": "a2a"},
    "cp2+zero3": {"zero_stage": 3},
    "cp2, recomputed": {"recompute": "full"},
    "pp2+cp2": {"pp_size": 2, "num_microbatches": 2},
    "cp2+dp2": {"dp_size": 2},
    # Split over tp, mixers are computed whole.
    "tp2+cp2": {"tp_size": 2},
}
# What tp leaves whole is shared over cp alone.
WHOLE_ON_TP = ("olmo_hybrid", "nemotron_h", "minimax", "kimi_linear", "bailing_hybrid")


@functools.lru_cache(maxsize=2)
def twin(model_type, **changes):
    return make_twin(CONFIG_MAPPING[model_type](), microbatches=2, changes=changes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_process(name):
    comparison = check_twin(twin("qwen3_next"), ConfigUnderTest(cp_size=2, **LAYOUTS[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", TYPES[1:])
def test_types_equal_one_process(model_type):
    comparison = check_twin(twin(model_type), ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model_type", WHOLE_ON_TP)
def test_blocks_that_lie_whole_on_tp_ranks(model_type, sequence_parallel):
    layout = ConfigUnderTest(cp_size=2, tp_size=2, sequence_parallel=sequence_parallel)
    comparison = check_twin(twin(model_type), layout)
    assert comparison.passed, comparison.report()


def test_biases_are_added_once():
    comparison = check_twin(twin("nemotron_h", use_bias=True), ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def heads_of_the_first():
    """Has every rank compute the first one's heads."""
    stock = head_blocks.SharedHeadBlock._take_heads

    def take(self, block):
        rank = ContextGroups.rank
        ContextGroups.rank = property(lambda groups: 0)
        try:
            stock(self, block)
        finally:
            ContextGroups.rank = rank

    head_blocks.SharedHeadBlock._take_heads = take


def own_sums():
    """Hands each rank the tokens of its own heads' sum."""
    head_blocks.scatter_tokens = lambda hidden, dim, order, group: head_blocks.WholeBlock.own_tokens(_ONLY[0], hidden)
    stock = head_blocks.SharedHeadBlock._enter

    def enter(self, *args):
        _ONLY[:] = [self]
        return stock(self, *args)

    head_blocks.SharedHeadBlock._enter = enter


_ONLY = []


@pytest.mark.parametrize("model_type", TYPES)
def test_the_heads_of_one_rank_alone_are_found(model_type):
    """And so that heads are shared at all."""
    assert not check_twin(twin(model_type), ConfigUnderTest(cp_size=2), sabotage=heads_of_the_first).passed


def test_sums_of_one_rank_are_found():
    assert not check_twin(twin("qwen3_next"), ConfigUnderTest(cp_size=2), sabotage=own_sums).passed

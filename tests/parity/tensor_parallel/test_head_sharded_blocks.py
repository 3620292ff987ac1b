"""Mixers whose heads the ranks of a row share, against one process."""

import dataclasses
import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.context_parallel import head_parallel_blocks
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.layers import find_full_sequence_blocks, find_layers
from hf_megatron.models.registry import registered_spec
from hf_megatron.models.spec import generic
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.tensor_parallel import attention_heads, head_sharded_blocks
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen4_exp_text",
    "olmo_hybrid",
    "nemotron_h",
    "minimax",
    "kimi_linear",
    "bailing_hybrid",
    "jamba",
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
ON_TP = ("olmo_hybrid", "nemotron_h", "minimax", "kimi_linear", "bailing_hybrid", "jamba", "qwen3_next")


@functools.lru_cache(maxsize=2)
def tiny_model(model_type, **changes):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2, changes=changes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_process(name):
    comparison = check_tiny_model(tiny_model("qwen3_next"), ConfigUnderTest(cp_size=2, **LAYOUTS[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("name", ["cp2+zero3", "cp2, recomputed", "pp2+cp2", "tp2+cp2+zero3"])
def test_layouts_with_a_norm_of_all_ranks(name):
    layouts = LAYOUTS | {"tp2+cp2+zero3": {"tp_size": 2, "zero_stage": 3}}
    comparison = check_tiny_model(tiny_model("minimax"), ConfigUnderTest(cp_size=2, **layouts[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", TYPES[1:])
def test_types_equal_one_process(model_type):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model_type", ON_TP)
def test_blocks_that_are_replicated_on_tp_ranks(model_type, sequence_parallel):
    layout = ConfigUnderTest(cp_size=2, tp_size=2, sequence_parallel=sequence_parallel)
    comparison = check_tiny_model(tiny_model(model_type), layout)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("padding", ["left", "right", "packed"])
@pytest.mark.parametrize("model_type", ["minimax", "kimi_linear", "jamba"])
def test_batches_equal_one_process(model_type, padding):
    changed = of_batches(model_type, padding)
    comparison = check_tiny_model(changed, ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def of_batches(model_type, padding):
    """A twin whose first rows are padded, or whose rows hold two documents."""
    base = tiny_model(model_type)
    batches = [_changed(batch, padding) for batch in base.batches]
    reference = measure(base.load(), batches)
    reference.without, reference.cancelled = base.reference.without, base.reference.cancelled
    return dataclasses.replace(base, batches=batches, reference=reference)


def _changed(batch, padding):
    batch = {key: value for key, value in batch.items() if key in ("input_ids", "labels")}
    rows, length = batch["input_ids"].shape
    if padding == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(rows, -1)
        return batch | {"position_ids": positions, "use_cache": False}
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, :4] = 0
    mask = mask if padding == "left" else mask.flip(1)
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("length", [4, 5, 31])
def test_samples_of_any_length(length):
    """Lightning attention has blocks of four tokens in this twin."""
    rows = make_tiny_model(CONFIG_MAPPING["minimax"](), microbatches=2, sequence_length=length)
    comparison = check_tiny_model(rows, ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def widths(model, batch, spec):
    """Returns what the last projections of mixers are given: tokens, and the features of all heads at hand."""
    found = []
    note = shard_safe(lambda module, args, output: found.append((args[0].shape[1], args[0].shape[-1])))
    for name in find_full_sequence_blocks(model, spec, find_layers(model, spec, "cp_size")):
        block, known = model.get_submodule(name), spec.cp.head_sharded_blocks.get(generic(name))
        for weight in known.weights if known is not None else ():
            if weight in ("o_proj.weight", "out_proj.weight"):
                block.get_submodule(weight.removesuffix(".weight")).register_forward_hook(note)
    model(**batch)
    return found


@pytest.mark.parametrize("model_type", TYPES)
def test_each_rank_computes_its_share_of_heads(model_type):
    one, layout = tiny_model(model_type), ConfigUnderTest(cp_size=2)
    batch = one.batches[0]
    spec = registered_spec(one.model_on_meta())
    shared = [(tokens, width // 2) for tokens, width in widths(one.load(), batch, spec)]
    found = run_ranks(lambda: widths(one.load(megatron_config=layout), batch, spec), 2)
    assert shared and found == [shared] * 2


def shared_blocks(one, layout):
    """Returns how many calls of blocks compute some heads in a forward, over tp and over cp."""
    stock, calls = head_sharded_blocks.HeadsOfRank.take, []

    def take(self, block):
        calls.append(self)
        stock(self, block)

    head_sharded_blocks.HeadsOfRank.take = take
    model = one.load(megatron_config=layout)
    model(**one.batches[0])
    over_tp = sum(own.group is parallel_state(model).mesh.tp_group for own in calls)
    return [over_tp, len(calls) - over_tp]


@pytest.mark.parametrize("model_type", ON_TP)
def test_heads_are_shared_over_one_axis(model_type):
    """Over tp, where both are there: of a rank's heads each cp rank computes whole rows."""
    one, layout = tiny_model(model_type), ConfigUnderTest(cp_size=2, tp_size=2)
    spec = registered_spec(one.model_on_meta())
    # Its linears have a plan of their own.
    blocks = 0 if model_type == "qwen3_next" else len(widths(one.load(), one.batches[0], spec))
    assert run_ranks(lambda: shared_blocks(one, layout), 4) == [[blocks, 0]] * 4


def test_biases_are_added_once():
    comparison = check_tiny_model(tiny_model("nemotron_h", use_bias=True), ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def heads_of_the_first():
    """Has every rank compute the first one's heads."""
    stock = head_sharded_blocks.HeadsOfRank.take

    def take(self, block):
        self.rank = 0
        stock(self, block)

    head_sharded_blocks.HeadsOfRank.take = take


def own_sums():
    """Hands each rank the tokens of its own heads' sum."""
    head_parallel_blocks.scatter_tokens = lambda hidden, dim, order, group: (
        head_parallel_blocks.FullSequenceBlock.own_tokens(_ONLY[0], hidden)
    )
    stock = head_parallel_blocks.SharedHeadBlock._enter

    def enter(self, *args):
        _ONLY[:] = [self]
        return stock(self, *args)

    head_parallel_blocks.SharedHeadBlock._enter = enter


def own_parts():
    """Takes what a rank's heads make of a norm's squares, or of a projection of all heads, for everybody's."""
    attention_heads.sum_over_ranks = head_sharded_blocks.sum_over_ranks = lambda part, group: part * group.size()


def unsummed_gradients():
    """Has no rank hear what others make of its part of such a sum."""
    stock = head_sharded_blocks.sum_over_ranks

    def own(part, group):
        return stock(part.detach(), group) + part - part.detach()

    attention_heads.sum_over_ranks = head_sharded_blocks.sum_over_ranks = own


def decays_of_the_first():
    """Has states of every rank's heads decay as those of the first one's."""
    stock = head_sharded_blocks.HeadsOfRank._replace

    def replace(self, held, own, value):
        if own in ("slope_rate", "query_decay", "key_decay"):
            value = held[own].narrow(0, 0, value.shape[0])
        stock(self, held, own, value)

    head_sharded_blocks.HeadsOfRank._replace = replace


_ONLY = []


@pytest.mark.parametrize("model_type", TYPES)
def test_the_heads_of_one_rank_alone_are_found(model_type):
    """And so that heads are shared at all."""
    assert not check_tiny_model(tiny_model(model_type), ConfigUnderTest(cp_size=2), sabotage=heads_of_the_first).passed


def test_sums_of_one_rank_are_found():
    assert not check_tiny_model(tiny_model("qwen3_next"), ConfigUnderTest(cp_size=2), sabotage=own_sums).passed


@pytest.mark.parametrize("fault", [own_parts, unsummed_gradients])
@pytest.mark.parametrize("model_type", ["minimax", "jamba"])
def test_sums_of_all_heads_are_found(model_type, fault):
    assert not check_tiny_model(tiny_model(model_type), ConfigUnderTest(cp_size=2), sabotage=fault).passed


def test_decays_of_other_heads_are_found():
    assert not check_tiny_model(tiny_model("minimax"), ConfigUnderTest(cp_size=2), sabotage=decays_of_the_first).passed

"""Parity tests of token mixers with heads sharded over cp."""

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
    # Mixers sharded over tp compute full sequences.
    "tp2+cp2": {"tp_size": 2},
}
ON_TP = ("olmo_hybrid", "nemotron_h", "minimax", "kimi_linear", "bailing_hybrid", "jamba", "qwen3_next")


@functools.lru_cache(maxsize=2)
def get_tiny_model(model_type, **changes):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2, changes=changes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_match_single_process(name):
    comparison = check_tiny_model(get_tiny_model("qwen3_next"), ConfigUnderTest(cp_size=2, **LAYOUTS[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("name", ["cp2+zero3", "cp2, recomputed", "pp2+cp2", "tp2+cp2+zero3"])
def test_layouts_with_a_cross_head_norm(name):
    layouts = LAYOUTS | {"tp2+cp2+zero3": {"tp_size": 2, "zero_stage": 3}}
    comparison = check_tiny_model(get_tiny_model("minimax"), ConfigUnderTest(cp_size=2, **layouts[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", TYPES[1:])
def test_types_match_single_process(model_type):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model_type", ON_TP)
def test_blocks_replicated_over_tp(model_type, sequence_parallel):
    layout = ConfigUnderTest(cp_size=2, tp_size=2, sequence_parallel=sequence_parallel)
    comparison = check_tiny_model(get_tiny_model(model_type), layout)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("padding", ["left", "right", "packed"])
@pytest.mark.parametrize("model_type", ["minimax", "kimi_linear", "jamba"])
def test_batches_match_single_process(model_type, padding):
    changed = get_tiny_model_with_padding(model_type, padding)
    comparison = check_tiny_model(changed, ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def get_tiny_model_with_padding(model_type, padding):
    """Returns a tiny model with a padded first sample per batch, or with two packed documents per sequence."""
    base = get_tiny_model(model_type)
    batches = [_change_batch(batch, padding) for batch in base.batches]
    reference = measure(base.load(), batches)
    reference.without, reference.cancelled = base.reference.without, base.reference.cancelled
    return dataclasses.replace(base, batches=batches, reference=reference)


def _change_batch(batch, padding):
    batch = {key: value for key, value in batch.items() if key in ("input_ids", "labels")}
    batch_size, length = batch["input_ids"].shape
    if padding == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(batch_size, -1)
        return batch | {"position_ids": positions, "use_cache": False}
    mask = torch.ones(batch_size, length, dtype=torch.int64)
    mask[0, :4] = 0
    mask = mask if padding == "left" else mask.flip(1)
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("length", [4, 5, 31])
def test_any_sequence_length(length):
    """Lightning attention has blocks of four tokens in this tiny model."""
    tiny_model = make_tiny_model(CONFIG_MAPPING["minimax"](), microbatches=2, sequence_length=length)
    comparison = check_tiny_model(tiny_model, ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def record_projection_widths(model, batch, spec):
    """Returns the number of tokens and of features in the input of each mixer's output projection."""
    widths = []
    record_width = shard_safe(lambda module, args, output: widths.append((args[0].shape[1], args[0].shape[-1])))
    for name in find_full_sequence_blocks(model, spec, find_layers(model, spec, "cp_size")):
        block, sharding = model.get_submodule(name), spec.cp.head_sharded_blocks.get(generic(name))
        for weight in sharding.weights if sharding is not None else ():
            if weight in ("o_proj.weight", "out_proj.weight"):
                block.get_submodule(weight.removesuffix(".weight")).register_forward_hook(record_width)
    model(**batch)
    return widths


@pytest.mark.parametrize("model_type", TYPES)
def test_ranks_compute_their_local_heads(model_type):
    tiny_model, layout = get_tiny_model(model_type), ConfigUnderTest(cp_size=2)
    batch = tiny_model.batches[0]
    spec = registered_spec(tiny_model.model_on_meta())
    local_widths = [(tokens, width // 2) for tokens, width in record_projection_widths(tiny_model.load(), batch, spec)]
    rank_widths = run_ranks(lambda: record_projection_widths(tiny_model.load(megatron_config=layout), batch, spec), 2)
    assert local_widths and rank_widths == [local_widths] * 2


def count_head_sharded_calls(one, layout):
    """Returns the numbers of block calls with heads sharded over tp and over cp in a forward."""
    stock, calls = head_sharded_blocks.HeadsOfRank.take, []

    def take(self, block):
        calls.append(self)
        stock(self, block)

    head_sharded_blocks.HeadsOfRank.take = take
    model = one.load(megatron_config=layout)
    model(**one.batches[0])
    over_tp = sum(heads.group is parallel_state(model).mesh.tp_group for heads in calls)
    return [over_tp, len(calls) - over_tp]


@pytest.mark.parametrize("model_type", ON_TP)
def test_heads_are_sharded_over_one_axis(model_type):
    """With tp and cp, heads are sharded over tp, and each cp rank computes full sequences."""
    tiny_model, layout = get_tiny_model(model_type), ConfigUnderTest(cp_size=2, tp_size=2)
    spec = registered_spec(tiny_model.model_on_meta())
    # Qwen3-Next's linears have a tensor-parallel plan.
    blocks = (
        0
        if model_type == "qwen3_next"
        else len(record_projection_widths(tiny_model.load(), tiny_model.batches[0], spec))
    )
    assert run_ranks(lambda: count_head_sharded_calls(tiny_model, layout), 4) == [[blocks, 0]] * 4


def test_biases_are_added_once():
    comparison = check_tiny_model(get_tiny_model("nemotron_h", use_bias=True), ConfigUnderTest(cp_size=2))
    assert comparison.passed, comparison.report()


def compute_first_rank_heads():
    """Computes the heads of the first rank on every rank."""
    stock = head_sharded_blocks.HeadsOfRank.take

    def take(self, block):
        self.rank = 0
        stock(self, block)

    head_sharded_blocks.HeadsOfRank.take = take


def skip_head_sum():
    """Replaces the reduce-scatter of partial outputs with a local slice."""
    head_parallel_blocks.scatter_tokens = lambda hidden, dim, order, group: (
        head_parallel_blocks.FullSequenceBlock.own_tokens(_CURRENT_BLOCK[0], hidden)
    )
    stock = head_parallel_blocks.SharedHeadBlock._enter

    def enter(self, *args):
        _CURRENT_BLOCK[:] = [self]
        return stock(self, *args)

    head_parallel_blocks.SharedHeadBlock._enter = enter


def use_local_sums():
    """Scales local sums of norm squares, or of a projection over all heads, instead of all-reducing them."""
    attention_heads.sum_over_ranks = head_sharded_blocks.sum_over_ranks = lambda part, group: part * group.size()


def skip_sum_gradients():
    """Skips the all-reduce of such a sum's gradient."""
    stock = head_sharded_blocks.sum_over_ranks

    def sum_without_gradient(part, group):
        return stock(part.detach(), group) + part - part.detach()

    attention_heads.sum_over_ranks = head_sharded_blocks.sum_over_ranks = sum_without_gradient


def use_first_rank_decays():
    """Uses the decay rates of the first rank's heads on every rank."""
    stock = head_sharded_blocks.HeadsOfRank._replace

    def replace(self, held, own, value):
        if own in ("slope_rate", "query_decay", "key_decay"):
            value = held[own].narrow(0, 0, value.shape[0])
        stock(self, held, own, value)

    head_sharded_blocks.HeadsOfRank._replace = replace


_CURRENT_BLOCK = []


@pytest.mark.parametrize("model_type", TYPES)
def test_duplicate_heads_are_detected(model_type):
    """The fault changes results only if heads are sharded."""
    assert not check_tiny_model(
        get_tiny_model(model_type), ConfigUnderTest(cp_size=2), sabotage=compute_first_rank_heads
    ).passed


def test_skipped_head_sum_is_detected():
    assert not check_tiny_model(get_tiny_model("qwen3_next"), ConfigUnderTest(cp_size=2), sabotage=skip_head_sum).passed


@pytest.mark.parametrize("fault", [use_local_sums, skip_sum_gradients])
@pytest.mark.parametrize("model_type", ["minimax", "jamba"])
def test_local_cross_head_sums_are_detected(model_type, fault):
    assert not check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(cp_size=2), sabotage=fault).passed


def test_wrong_decays_are_detected():
    assert not check_tiny_model(
        get_tiny_model("minimax"), ConfigUnderTest(cp_size=2), sabotage=use_first_rank_decays
    ).passed

"""Parity tests of context parallelism: loss, every gradient and the weights after two steps."""

import dataclasses
import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.context_parallel import axis as context_parallel
from hf_megatron.context_parallel import full_sequence_blocks, local_tokens, token_exchange
from hf_megatron.context_parallel.attention import TokenLayout
from hf_megatron.context_parallel.masks import SequenceMask
from hf_megatron.core.communication import mean_grad_ops
from hf_megatron.core.communication.collectives import take_shard
from hf_megatron.data_parallel.grad_sync_groups import GradSyncGroup
from hf_megatron.losses import targets as call_targets
from hf_megatron.losses import token_loss
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import vocab_parallel_head
from hf_megatron.tensor_parallel.linear import RowParallelLinear
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

TYPES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "gpt2")
LAYOUTS = {
    "cp2": {"cp_size": 2},
    "cp4": {"cp_size": 4},
    "cp2, heads": {"cp_size": 2, "cp_comm_type": "a2a"},
    "cp2, gathered": {"cp_size": 2, "cp_comm_type": "all_gather"},
    "tp2+cp2": {"tp_size": 2, "cp_size": 2},
    "tp2+sp+cp2": {"tp_size": 2, "sequence_parallel": True, "cp_size": 2},
    "cp2+dp2+zero0": {"cp_size": 2, "dp_size": 2, "zero_stage": 0},
    "cp2+dp2+zero1": {"cp_size": 2, "dp_size": 2},
    "cp2+dp2+zero2": {"cp_size": 2, "dp_size": 2, "zero_stage": 2},
    "cp2+dp2, repeated": {"cp_size": 2, "dp_size": 2, "dp_replicate_size": 2},
    "tp2+pp2+cp2": {"tp_size": 2, "pp_size": 2, "cp_size": 2, "num_microbatches": 2},
    "cp2+zero3": {"cp_size": 2, "zero_stage": 3},
    "cp2+dp2+zero3": {"cp_size": 2, "dp_size": 2, "zero_stage": 3},
    "tp2+cp2+zero3": {"tp_size": 2, "cp_size": 2, "zero_stage": 3},
    "cp4, heads and ring": {"cp_size": 4, "cp_comm_type": "a2a+p2p"},
    "pp2+cp2": {"pp_size": 2, "cp_size": 2, "num_microbatches": 2},
}


@functools.lru_cache(maxsize=2)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_llama_matches_single_process(name):
    comparison = check_tiny_model(get_tiny_model("llama"), ConfigUnderTest(**LAYOUTS[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("model_type", "name"),
    [(kind, name) for kind in TYPES[1:] for name in ("cp2", "cp2, heads") if kind != "gpt_oss" or name == "cp2"],
)
def test_types_match_single_process(model_type, name):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS[name]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    "model_type", ["gpt2", "gpt_oss", "qwen3_next", "doge", "bloom", "falcon", "gptj", "llama4_text"]
)
def test_sequence_parallel_within_context_parallel(model_type):
    """Biases after row-parallel linears, and token-mixing blocks, where cp shards of a sequence are split over tp."""
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS["tp2+sp+cp2"]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("name", ["cp2", "cp2, heads", "tp2+sp+cp2", "pp2+cp2"])
def test_recomputed_attention(name):
    comparison = check_tiny_model(get_tiny_model("gpt_oss"), ConfigUnderTest(**LAYOUTS[name], recompute="selective"))
    assert comparison.passed, comparison.report()


def test_local_bias_gradients_are_detected():
    """Seeded fault: the gradient of a bias on a sequence-parallel output is not summed over tp."""

    def skip_bias_gradient_sum():
        RowParallelLinear.sum_bias_gradient = property(lambda self: False, lambda self, value: None)

    # gpt_oss: round-off of the reference widens its tolerances.
    for model_type in ("gpt2", "gpt_oss"):
        comparison = check_tiny_model(
            get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS["tp2+sp+cp2"]), sabotage=skip_bias_gradient_sum
        )
        assert not comparison.passed and comparison.worst.value > 10


def sum_gradients_over_cp():
    """Sums gradients over cp instead of averaging them."""
    along = GradSyncGroup.along.__func__
    GradSyncGroup.along = classmethod(
        lambda cls, axis, mesh: dataclasses.replace(along(cls, axis, mesh), divisor=mesh.axes.size("dp"))
    )


def skip_cp_reduction():
    """Reduces gradients over dp only, not over cp."""
    context_parallel.place = lambda model, state: stock(model, state) or _average_over_dp_only(state)


stock = context_parallel.place


def _average_over_dp_only(state):
    for name, sharding in state.shardings.items():
        state.shardings[name] = dataclasses.replace(
            sharding, gradient=dataclasses.replace(sharding.gradient, average="dp")
        )


def restart_positions_per_rank():
    """Uses the first tokens of a sequence on each rank, so that positions start at zero."""
    TokenLayout.own = lambda self, tensor, dim=1: tensor.narrow(dim, 0, self.order.sizes[self.groups.rank])


def ignore_windows():
    SequenceMask.window = lambda self, size: self


def skip_loss_gradient_sum():
    """Passes on the local gradient of the loss without the all-reduce."""
    mean_grad_ops._Sum.backward = staticmethod(lambda ctx, gradient: (gradient, None))


def shift_labels_after_split():
    """Shifts labels after they were sharded."""
    resolve_targets = call_targets.resolve_targets
    token_loss.resolve_targets = lambda labels, shift_labels, **options: labels
    original_own = local_tokens.HeldTokens.own
    local_tokens.HeldTokens.own = lambda self, labels: resolve_targets(
        original_own(self, labels), None, shifts=True, ignore_index=call_targets.IGNORE_INDEX
    )


def use_local_denominator():
    """Divides the local loss by the number of local targets."""
    original_own = local_tokens.HeldTokens.own
    local_tokens.HeldTokens.own = lambda self, labels: _record_local_targets(original_own(self, labels))
    sum_of_ranks = local_tokens.HeldTokens.sum
    local_tokens.HeldTokens.sum = lambda self, part: sum_of_ranks(self, part * _TARGET_COUNTS[0]) / _TARGET_COUNTS[1]
    vocab_parallel_head.count_targets = lambda targets, ignore_index: _record_call_targets(
        call_targets.count_targets(targets, ignore_index)
    )


_TARGET_COUNTS = [1.0, 1.0]


def _record_local_targets(labels):
    _TARGET_COUNTS[1] = float((labels != call_targets.IGNORE_INDEX).sum()) or 1.0
    return labels


def _record_call_targets(count):
    _TARGET_COUNTS[0] = float(count)
    return count


def skip_token_gradient_sum():
    """Replaces the reduce-scatter of gathered tokens' gradients with a local slice."""
    token_exchange.reduce_scatter = lambda joined, dim, group: take_shard(joined, dim, group).contiguous()


def skip_full_sequence_blocks():
    """Runs blocks that need full sequences on local tokens."""
    full_sequence_blocks.FullSequenceBlock.install = lambda self, block, hooks: None


FAULTS = {
    "gradients added up over cp": ("llama", sum_gradients_over_cp),
    "cp left out of the reduction": ("llama", skip_cp_reduction),
    "positions counted from zero": ("llama", restart_positions_per_rank),
    "windows taken as full": ("gemma2", ignore_windows),
    "a loss of parts": ("llama", skip_loss_gradient_sum),
    "labels shifted after the cut": ("llama", shift_labels_after_split),
    "targets counted in parts": ("llama", use_local_denominator),
    "gradients of joined tokens not summed": ("gpt2", skip_token_gradient_sum),
    "a mixer on parts of rows": ("llama4_text", skip_full_sequence_blocks),
}


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_detected(name):
    model_type, fault = FAULTS[name]
    layout = ConfigUnderTest(cp_size=2, cp_comm_type="p2p")
    assert not check_tiny_model(get_tiny_model(model_type), layout, sabotage=fault).passed


@pytest.mark.parametrize("name", ["padded left", "padded right", "packed", "labels on one rank"])
@pytest.mark.parametrize("scheme", ["p2p", "a2a"])
def test_batches_match_single_process(name, scheme):
    changed = replace_batches(get_tiny_model("mistral"), name)
    comparison = check_tiny_model(changed, ConfigUnderTest(cp_size=2, cp_comm_type=scheme))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", ["cp4", "tp2+sp+cp2", "pp2+cp2", "cp2+dp2+zero2", "cp2+dp2+zero3", "tp2+pp2+cp2"])
@pytest.mark.parametrize("name", ["padded left", "padded right", "packed", "labels on one rank"])
def test_batches_on_wider_layouts(name, layout):
    comparison = check_tiny_model(replace_batches(get_tiny_model("mistral"), name), ConfigUnderTest(**LAYOUTS[layout]))
    assert comparison.passed, comparison.report()


@functools.cache
def _get_reference(name):
    base = get_tiny_model("mistral")
    batches = [_change_batch(batch, name) for batch in base.batches]
    reference = measure(base.load(), batches)
    reference.without, reference.cancelled = base.reference.without, base.reference.cancelled
    return batches, reference


def replace_batches(base, name):
    batches, reference = _get_reference(name)
    return dataclasses.replace(base, batches=batches, reference=reference)


def _change_batch(batch, name):
    batch = {key: value for key, value in batch.items() if key in ("input_ids", "labels")}
    batch_size, length = batch["input_ids"].shape
    if name == "labels on one rank":
        # Targets of tokens 6 and 7 of 13, which are on the same rank in both token orders.
        others = torch.ones(length, dtype=torch.bool)
        others[7:9] = False
        return batch | {"labels": batch["input_ids"].masked_fill(others, -100)}
    if name == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(batch_size, -1)
        return batch | {"position_ids": positions, "use_cache": False}
    mask = torch.ones(batch_size, length, dtype=torch.int64)
    mask[0, :4] = 0
    mask = mask if name == "padded left" else mask.flip(1)
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}

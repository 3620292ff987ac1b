"""Parity tests of causal types that each need a mechanism of their own, in tensor, data and pipeline parallelism."""

import dataclasses
import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.losses import batch_loss, inline_losses
from hf_megatron.losses.targets import target_names
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel import boundary, module_mixins, stage_payload
from hf_megatron.tensor_parallel import attention_heads, axis, head_sharded_blocks, region
from hf_megatron.tensor_parallel.experts import SharedLogits
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

# Router loss from logits inside a block whose outputs are summed over tp.
CHANGES = {"jetmoe": {"output_router_logits": True}}
LAYOUTS = {
    # Norms over the features of all ranks, which have unequal numbers of features.
    "bitnet": {"tp_size": 4},
    # Interleaved blocks of a fused projection.
    "codegen": {"tp_size": 2, "sequence_parallel": True},
    "jetmoe": {"tp_size": 2},
    # Attention bias that is added by the layer.
    "gpt_neox_japanese": {"tp_size": 2, "sequence_parallel": True},
    # Head counts read from the config, and layers that return tuples.
    "xlstm": {"tp_size": 2, "pp_size": 2},
    # Parameters of the model outside its layers.
    "zaya": {"pp_size": 2},
    # Module of the first stage that every stage runs.
    "cpmant": {"pp_size": 2},
    # Sequence-first hidden states.
    "xlnet": {"tp_size": 2, "sequence_parallel": True},
    # One loss per codebook.
    "musicgen_decoder": {"pp_size": 2},
    "musicgen_melody_decoder": {"dp_size": 2},
    # Hidden states that the layer loop stores for later layers.
    "inkling2_text": {"pp_size": 3},
}
# Classes of types without an auto class.
CLASSES = {"musicgen_decoder": "MusicgenForCausalLM", "musicgen_melody_decoder": "MusicgenMelodyForCausalLM"}


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    config, changes = CONFIG_MAPPING[model_type](), CHANGES.get(model_type, {})
    return make_tiny_model(config, model_class=CLASSES.get(model_type), microbatches=2, changes=changes)


def use_local_norm_squares():
    attention_heads.sum_over_ranks = lambda squares, group: 4 * squares


def ignore_interleave_rounds():
    original = head_sharded_blocks._Cut.of
    head_sharded_blocks._Cut.of = lambda block, of, name: original(
        block, dataclasses.replace(of, interleave_rounds=1), name
    )


def skip_router_logit_scaling():
    SharedLogits.install = lambda self, module: None


def skip_layer_bias_gradient_sum():
    original = axis.assign_shardings
    axis.assign_shardings = lambda *args: original(*args[:-1], frozenset())


def keep_global_head_count():
    head_sharded_blocks.HeadsOfRank._replace = lambda self, held, own, value: (
        None if own == "num_heads" else self._replaced.append((held, own, held.get(own))) or held.update({own: value})
    )


def skip_off_stage_zeros():
    boundary.zeros_for_off_stage = lambda tensor: tensor


def return_zeros_for_positions():
    module_mixins.OffStagePositions.forward = module_mixins.OffStageInput.forward


def keep_local_states():
    region.SequenceStack.with_gathered_states = lambda self, function: function
    region.SequenceStack.get_token_dim = lambda self, tensor: 1


def use_first_codebook_targets():
    # Counts only the labels; the check of a microbatch's number of terms is disabled.
    batch_loss.BatchLoss.require_terms = lambda self, terms, name: None
    batch_loss.with_codebooks = lambda arguments: target_names(arguments)
    inline_losses._name_of = lambda function, labels, args: labels.argument


def skip_layer_input_storage():
    stage_payload.StagePayload.keep_input = lambda self, layer, hidden_states: None


FAULTS = {
    "bitnet": use_local_norm_squares,
    "codegen": ignore_interleave_rounds,
    "jetmoe": skip_router_logit_scaling,
    "gpt_neox_japanese": skip_layer_bias_gradient_sum,
    "xlstm": keep_global_head_count,
    "zaya": skip_off_stage_zeros,
    "cpmant": return_zeros_for_positions,
    "xlnet": keep_local_states,
    "musicgen_decoder": use_first_codebook_targets,
    "inkling2_text": skip_layer_input_storage,
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_match_single_process(model_type):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]))
    assert comparison.passed, comparison.report()


# Faults that end in an error instead of other numbers.
RAISED = {
    "xlstm": "shape '.*' is invalid for input of size",
    "zaya": "The values of this tensor are not on this rank",
    "cpmant": "too many indices for tensor of dimension 2",
    # Ranks exchange tensors of different sizes, which may also kill one of them.
    "xlnet": "does not broadcast with previously seen size|died without a result",
}


@pytest.mark.parametrize("model_type", FAULTS)
def test_seeded_faults_are_detected(model_type):
    def check():
        layout = ConfigUnderTest(**LAYOUTS[model_type])
        return check_tiny_model(get_tiny_model(model_type), layout, sabotage=FAULTS[model_type])

    if model_type in RAISED:
        with pytest.raises(RankError, match=RAISED[model_type]):
            check()
    else:
        assert not check().passed


@pytest.mark.parametrize("layers", range(1, 6))
def test_stored_states_cross_every_partition(layers):
    comparison = check_tiny_model(
        get_tiny_model("inkling2_text"), ConfigUnderTest(pp_size=2, pipeline_partition=(layers, 6 - layers))
    )
    assert comparison.passed, comparison.report()


def test_stored_states_with_sequence_parallelism():
    comparison = check_tiny_model(get_tiny_model("inkling2_text"), ConfigUnderTest(tp_size=2, sequence_parallel=True))
    assert comparison.passed, comparison.report()


def test_stored_states_get_gradients_with_recompute():
    """With recompute the placeholder of the embedding output requires a gradient."""
    comparison = check_tiny_model(get_tiny_model("inkling2_text"), ConfigUnderTest(pp_size=2, recompute="full"))
    assert comparison.passed, comparison.report()


def test_xlnet_memories_have_full_sequences():
    tiny_model = get_tiny_model("xlnet")
    batch = tiny_model.batches[0]
    with torch.no_grad():
        expected = tiny_model.load().eval()(**batch).mems

    def on_rank():
        model = tiny_model.load(megatron_config=ConfigUnderTest(**LAYOUTS["xlnet"])).eval()
        with torch.no_grad():
            return [memory.clone() for memory in model(**batch).mems]

    for memories in run_ranks(on_rank, 2):
        torch.testing.assert_close(memories, list(expected))


def test_xlnet_target_mapping_with_sp_raises():
    tiny_model = get_tiny_model("xlnet")
    ids = tiny_model.batches[0]["input_ids"]
    mapping = torch.eye(ids.shape[1])[None, -2:].expand(len(ids), -1, -1)

    def on_rank():
        tiny_model.load(megatron_config=ConfigUnderTest(**LAYOUTS["xlnet"]))(ids, target_mapping=mapping)

    with pytest.raises(RankError, match="target_mapping of XLNet.*sequence_parallel=False"):
        run_ranks(on_rank, 2)

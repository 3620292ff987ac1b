"""Blocks of single causal types, each the only one that asks for its mechanism, and pipelines of such types."""

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

# A loss of the logits of routers inside of what ranks add up.
CHANGES = {"jetmoe": {"output_router_logits": True}}
LAYOUTS = {
    # Norms over the features of all ranks, which have unequal numbers of them.
    "bitnet": {"tp_size": 4},
    # Parts of a projection that follow each other in rounds.
    "codegen": {"tp_size": 2, "sequence_parallel": True},
    "jetmoe": {"tp_size": 2},
    # A bias of a block that the layer adds.
    "gpt_neox_japanese": {"tp_size": 2, "sequence_parallel": True},
    # Heads that a config counts, and tuples that layers return beside hidden states.
    "xlstm": {"tp_size": 2, "pp_size": 2},
    # Parameters of the model beside its layers.
    "zaya": {"pp_size": 2},
    # A module of the first stage that every one runs.
    "cpmant": {"pp_size": 2},
    # Tokens before rows.
    "xlnet": {"tp_size": 2, "sequence_parallel": True},
    # A loss of each codebook.
    "musicgen_decoder": {"pp_size": 2},
    "musicgen_melody_decoder": {"dp_size": 2},
    # States that a loop keeps for later layers.
    "inkling2_text": {"pp_size": 3},
}
# Of types that no Auto class knows.
CLASSES = {"musicgen_decoder": "MusicgenForCausalLM", "musicgen_melody_decoder": "MusicgenMelodyForCausalLM"}


@functools.lru_cache(maxsize=1)
def tiny_model(model_type):
    config, changes = CONFIG_MAPPING[model_type](), CHANGES.get(model_type, {})
    return make_tiny_model(config, class_name=CLASSES.get(model_type), microbatches=2, changes=changes)


def squares_of_one_rank():
    attention_heads.sum_over_ranks = lambda squares, group: 4 * squares


def parts_without_rounds():
    original = head_sharded_blocks._Cut.of
    head_sharded_blocks._Cut.of = lambda block, of, name: original(
        block, dataclasses.replace(of, interleave_rounds=1), name
    )


def gradients_of_logits_of_all_ranks():
    SharedLogits.install = lambda self, module: None


def biases_of_pieces():
    original = axis.assign_shardings
    axis.assign_shardings = lambda *args: original(*args[:-1], frozenset())


def a_count_of_all_heads():
    head_sharded_blocks.HeadsOfRank._replace = lambda self, held, own, value: (
        None if own == "num_heads" else self._replaced.append((held, own, held.get(own))) or held.update({own: value})
    )


def no_values_at_all():
    boundary.zeros_for_off_stage = lambda tensor: tensor


def zeros_as_wide_as_positions():
    module_mixins.OffStagePositions.forward = module_mixins.OffStageInput.forward


def states_of_pieces():
    region.SequenceStack.replicated_by = lambda self, function: function
    region.SequenceStack.get_token_dim = lambda self, tensor: 1


def targets_of_the_first_codebook():
    # Of the labels alone, whose number a microbatch's are compared with no more.
    batch_loss.BatchLoss.require_terms = lambda self, terms, name: None
    batch_loss.with_codebooks = lambda arguments: target_names(arguments)
    inline_losses._name_of = lambda function, labels, args: labels.argument


def nothing_kept_but_on_the_first_stage():
    stage_payload.StagePayload.keep_input = lambda self, layer, hidden_states: None


FAULTS = {
    "bitnet": squares_of_one_rank,
    "codegen": parts_without_rounds,
    "jetmoe": gradients_of_logits_of_all_ranks,
    "gpt_neox_japanese": biases_of_pieces,
    "xlstm": a_count_of_all_heads,
    "zaya": no_values_at_all,
    "cpmant": zeros_as_wide_as_positions,
    "xlnet": states_of_pieces,
    "musicgen_decoder": targets_of_the_first_codebook,
    "inkling2_text": nothing_kept_but_on_the_first_stage,
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_equal_one_process(model_type):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", FAULTS)
def test_seeded_faults_are_found(model_type):
    try:
        comparison = check_tiny_model(
            tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]), sabotage=FAULTS[model_type]
        )
    except RankError:
        # Some end in an error.
        return
    assert not comparison.passed


@pytest.mark.parametrize("layers", range(1, 6))
def test_kept_states_cross_every_cut(layers):
    comparison = check_tiny_model(
        tiny_model("inkling2_text"), ConfigUnderTest(pp_size=2, pipeline_partition=(layers, 6 - layers))
    )
    assert comparison.passed, comparison.report()


def test_kept_states_are_full_where_sequences_are_split():
    comparison = check_tiny_model(tiny_model("inkling2_text"), ConfigUnderTest(tp_size=2, sequence_parallel=True))
    assert comparison.passed, comparison.report()


def test_kept_states_have_their_gradient_where_layers_are_recomputed():
    """What stands for the embedding then asks for a gradient of its own."""
    comparison = check_tiny_model(tiny_model("inkling2_text"), ConfigUnderTest(pp_size=2, recompute="full"))
    assert comparison.passed, comparison.report()


def test_memory_between_layers_is_of_full_sequences():
    made = tiny_model("xlnet")
    batch = made.batches[0]
    with torch.no_grad():
        expected = made.load().eval()(**batch).mems

    def on_rank():
        model = made.load(megatron_config=ConfigUnderTest(**LAYOUTS["xlnet"])).eval()
        with torch.no_grad():
            return [memory.clone() for memory in model(**batch).mems]

    for of_rank in run_ranks(on_rank, 2):
        torch.testing.assert_close(of_rank, list(expected))


def test_predicted_tokens_that_are_none_of_the_sequence_are_refused():
    made = tiny_model("xlnet")
    ids = made.batches[0]["input_ids"]
    mapping = torch.eye(ids.shape[1])[None, -2:].expand(len(ids), -1, -1)

    def on_rank():
        made.load(megatron_config=ConfigUnderTest(**LAYOUTS["xlnet"]))(ids, target_mapping=mapping)

    with pytest.raises(RankError, match="target_mapping of XLNet.*sequence_parallel=False"):
        run_ranks(on_rank, 2)

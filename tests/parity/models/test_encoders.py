"""Encoders with something of their own: tables that no part of a call reads, or that are called by themselves."""

import functools
from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.errors import RankError
from hf_megatron.models import registry as lookup
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel import boundary, tied_weight_grads
from hf_megatron.tensor_parallel import region
from hf_megatron.testing.parity import check_tiny_model, measured
from hf_megatron.testing.tiny_model import make_batch
from tests.helpers.shared_tiny_models import make_tiny_model

PIPELINES = (
    {"pp_size": 2},
    {"pp_size": 2, "pipeline_schedule": "zbv"},
    {"pp_size": 2, "pipeline_schedule": "interleaved_1f1b"},
    {"pp_size": 2, "dp_size": 2, "zero_stage": 1},
    {"pp_size": 2, "tp_size": 2},
)
SPLIT = ({"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True})


def named(layout):
    return "+".join(f"{name}{value}" for name, value in layout.items())


@functools.lru_cache(maxsize=1)
def tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="masked", microbatches=2)


@pytest.mark.parametrize("layout", PIPELINES, ids=named)
@pytest.mark.parametrize("model_type", ["flaubert", "luke", "modernvbert", "neomme", "roformer"])
def test_pipelines_equal_one_process(model_type, layout):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", SPLIT, ids=named)
@pytest.mark.parametrize("model_type", ["big_bird", "esmc", "mobilebert", "neomme", "perceiver", "tapas", "xmod"])
def test_split_weights_equal_one_process(model_type, layout):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", ["luke", "mra"])
def test_split_weights_equal_one_process_where_sequences_are_full(model_type):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


def test_pieces_of_further_inputs_are_found():
    """The seeded fault: attention on whole queries, with keys and values of this rank's tokens alone."""

    def sabotage():
        region.replace_arguments = lambda block, args, kwargs, changes: (args, kwargs)

    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    with pytest.raises(RankError, match="must match the size of tensor|is invalid for input of size"):
        check_tiny_model(tiny_model("mobilebert"), layout, sabotage=sabotage)


def test_a_gradient_that_ends_where_a_loop_goes_on_is_found():
    """The seeded fault: hidden states of the stage before, on which the loop works in place, without their gradient."""

    def sabotage():
        hand = boundary.StageBoundary._hand_to_loop
        boundary.StageBoundary._hand_to_loop = lambda *arguments: hand(*arguments).detach()

    assert not check_tiny_model(tiny_model("flaubert"), ConfigUnderTest(pp_size=2), sabotage=sabotage).passed


def test_layers_whose_sum_is_the_loops_are_refused():
    with pytest.raises(RankError, match="with pre_norm its layer loop adds the sublayer outputs"):
        check_tiny_model(tiny_model("flaubert"), ConfigUnderTest(pp_size=2), sabotage=prefer_norms_first)


def prefer_norms_first():
    xlm = lookup.REGISTRY["flaubert"]

    def of_other_config(model):
        model.config.pre_norm = True
        return xlm(model)

    lookup.REGISTRY["flaubert"] = of_other_config


@functools.lru_cache(maxsize=1)
def text_alone():
    """LUKE without entities, whose table lies at both ends of a pipeline and is read at neither."""
    luke = tiny_model("luke")
    batches = [{name: of for name, of in batch.items() if not name.startswith("entity_")} for batch in luke.batches]
    text = measured(replace(luke, batches=batches))
    text.reference.without += ("entity", "w2e_", "e2w_", "e2e_")
    return text


@pytest.mark.parametrize("layout", PIPELINES[:4], ids=named)
def test_an_unread_table_has_no_gradient(layout):
    comparison = check_tiny_model(text_alone(), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


def test_zeros_for_an_unread_table_are_found():
    """The seeded fault: both ends add up a gradient that neither has, which AdamW would decay weights for."""

    def sabotage():
        tied_weight_grads.held_at_either_end = lambda model, tied, *_: [parameter for _, parameter in tied]

    comparison = check_tiny_model(text_alone(), ConfigUnderTest(pp_size=2), sabotage=sabotage)
    assert "entity_embeddings.weight is surplus" in str(comparison.worst)


@functools.lru_cache(maxsize=1)
def short_texts():
    """BigBird on texts that are too short for blocks: its forward makes it another attention."""
    long = tiny_model("big_bird")
    return measured(replace(long, batches=[make_batch(long.config, task="masked", seed=seed) for seed in range(2)]))


def test_an_attention_exchanged_by_a_forward_equals_one_process():
    comparison = check_tiny_model(short_texts(), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", [{"pp_size": 2}, SPLIT[1]], ids=named)
def test_an_attention_exchanged_by_a_forward_is_refused_where_it_cannot_be(layout):
    with pytest.raises(RankError, match="UnsupportedError"):
        check_tiny_model(short_texts(), ConfigUnderTest(**layout))

"""Parity tests of encoders with special modules: unused embeddings, or embeddings called on their own."""

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


def format_layout(layout):
    return "+".join(f"{name}{value}" for name, value in layout.items())


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="masked", microbatches=2)


@pytest.mark.parametrize("layout", PIPELINES, ids=format_layout)
@pytest.mark.parametrize("model_type", ["flaubert", "luke", "modernvbert", "neomme", "roformer"])
def test_pipelines_match_single_process(model_type, layout):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", SPLIT, ids=format_layout)
@pytest.mark.parametrize("model_type", ["big_bird", "esmc", "mobilebert", "neomme", "perceiver", "tapas", "xmod"])
def test_tensor_parallel_matches_single_process(model_type, layout):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", ["luke", "mra"])
def test_tp_without_sp_matches_single_process(model_type):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


def test_ungathered_attention_inputs_are_detected():
    """Seeded fault: attention gets full-sequence queries, but keys and values of the local tokens only."""

    def skip_argument_replacement():
        region.replace_arguments = lambda block, args, kwargs, changes: (args, kwargs)

    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    with pytest.raises(RankError, match="must match the size of tensor|is invalid for input of size"):
        check_tiny_model(get_tiny_model("mobilebert"), layout, sabotage=skip_argument_replacement)


def test_detached_stage_inputs_are_detected():
    """Seeded fault: received hidden states, which the layer loop modifies in place, are detached."""

    def detach_stage_inputs():
        hand = boundary.StageBoundary._hand_to_loop
        boundary.StageBoundary._hand_to_loop = lambda *arguments: hand(*arguments).detach()

    assert not check_tiny_model(
        get_tiny_model("flaubert"), ConfigUnderTest(pp_size=2), sabotage=detach_stage_inputs
    ).passed


def test_pre_norm_pipeline_raises():
    with pytest.raises(RankError, match="with pre_norm its layer loop adds the sublayer outputs"):
        check_tiny_model(get_tiny_model("flaubert"), ConfigUnderTest(pp_size=2), sabotage=enable_pre_norm)


def enable_pre_norm():
    xlm = lookup.REGISTRY["flaubert"]

    def make_pre_norm_spec(model):
        model.config.pre_norm = True
        return xlm(model)

    lookup.REGISTRY["flaubert"] = make_pre_norm_spec


@functools.lru_cache(maxsize=1)
def get_text_only_tiny_model():
    """Returns LUKE with batches without entities; both pipeline ends have the entity embedding, and neither uses it."""
    luke = get_tiny_model("luke")
    batches = [
        {name: value for name, value in batch.items() if not name.startswith("entity_")} for batch in luke.batches
    ]
    text = measured(replace(luke, batches=batches))
    text.reference.without += ("entity", "w2e_", "e2w_", "e2e_")
    return text


@pytest.mark.parametrize("layout", PIPELINES[:4], ids=format_layout)
def test_unused_embedding_has_no_gradient(layout):
    comparison = check_tiny_model(get_text_only_tiny_model(), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


def test_zero_gradients_for_unused_embedding_are_detected():
    """Seeded fault: both ends sum zeros for a gradient that neither has, and AdamW would decay the weight."""

    def reduce_unused_gradients():
        tied_weight_grads.held_at_either_end = lambda model, tied, *_: [parameter for _, parameter in tied]

    comparison = check_tiny_model(
        get_text_only_tiny_model(), ConfigUnderTest(pp_size=2), sabotage=reduce_unused_gradients
    )
    assert "entity_embeddings.weight is surplus" in str(comparison.worst)


@functools.lru_cache(maxsize=1)
def get_short_text_tiny_model():
    """Returns BigBird with sequences too short for block-sparse attention: its forward switches to full attention."""
    base = get_tiny_model("big_bird")
    return measured(replace(base, batches=[make_batch(base.config, task="masked", seed=seed) for seed in range(2)]))


def test_attention_swapped_in_forward_matches_single_process():
    comparison = check_tiny_model(get_short_text_tiny_model(), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", [{"pp_size": 2}, SPLIT[1]], ids=format_layout)
def test_attention_swapped_in_forward_raises_with_pp_or_sp(layout):
    with pytest.raises(RankError, match="UnsupportedError"):
        check_tiny_model(get_short_text_tiny_model(), ConfigUnderTest(**layout))

"""Tests of model fingerprints: the same parts for a model of any size and its tiny model."""

import json
import random

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.initialization import no_tie_weights

from hf_megatron import MegatronConfig, PlanError
from hf_megatron.core.axes import Axes
from hf_megatron.models import verified
from hf_megatron.models.fingerprint import COPIES, ENDS, Part, _common_attributes, describe_model, random_sites, silence
from hf_megatron.models.verification_gate import check_command
from hf_megatron.parallelize import plan
from hf_megatron.tensor_parallel.sharding_rules import assign_shardings
from hf_megatron.testing.cases import causal_types, get_class_task
from hf_megatron.testing.measure import Measurement
from hf_megatron.testing.parity import find_required_layers
from hf_megatron.testing.resolve_model import resolve_config
from hf_megatron.testing.rng_parity import rates, set_rates
from hf_megatron.testing.tiny_config import full_config, tiny_config
from hf_megatron.testing.tolerances import gradient_errors

TP2 = MegatronConfig(tp_size=2)
# Classes with a passed tensor-parallel result, as transformers loads them.
# Without tensor parallelism, checkpoints may be stored in a format that does not allow reading shards.
TP_RECORDS = [row for row in verified.records() if row["passed"] and row["layout"] in ("tp", "tp+sp")]
RECORDED = sorted({(row["model_type"], row["class"]) for row in TP_RECORDS})
# Older versions of transformers lack some of them.
RECORDED = [(model_type, name) for model_type, name in RECORDED if hasattr(transformers, name)]
RECORDED = [case for case in RECORDED if case[0] == getattr(transformers, case[1]).config_class.model_type]


def build_on_meta(config, class_name, *, tie=True):
    cls = getattr(transformers, class_name)
    with torch.device("meta"):
        if tie:
            return cls(config)
        with no_tie_weights():
            return cls(config)


def llama(**changes):
    config = CONFIG_MAPPING["llama"](**{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, **changes})
    return build_on_meta(config, "LlamaForCausalLM")


def get_features(model, layout=TP2):
    return describe_model(model).features(plan(model, layout, Axes.of(layout, 0)).shardings)


def get_lines(model, name):
    return {line for part in get_features(model).parts if part.name == name for line in part.lines}


def test_parts_reflect_structural_changes():
    assert "lm_head.weight is tied to model.embed_tokens.weight" in get_lines(llama(tie_word_embeddings=True), ENDS)
    assert get_lines(llama(), ENDS) >= {"lm_head: Linear(weight) vocab_parallel_head"}
    biased = get_lines(llama(attention_bias=True), "model.layers.*") - get_lines(llama(), "model.layers.*")
    assert len(biased) == 4 and "self_attn.q_proj: Linear(weight, bias) colwise" in biased
    assert get_lines(llama(num_key_value_heads=1), COPIES) == {
        "self_attn.k_proj: Linear(weight) colwise",
        "self_attn.v_proj: Linear(weight) colwise",
    }
    assert not get_lines(llama(num_key_value_heads=2), COPIES)


def test_parts_do_not_depend_on_sizes_and_call_settings():
    one = llama()
    other = llama(
        hidden_size=128, intermediate_size=344, num_hidden_layers=5, vocab_size=77, use_cache=False, pad_token_id=3
    )
    assert get_features(one).parts == get_features(other).parts


def test_different_layer_kinds_are_separate_parts():
    config = tiny_config(CONFIG_MAPPING["gemma2"]())
    model_features = get_features(build_on_meta(config, "Gemma2ForCausalLM"))
    assert sorted(part.name for part in model_features.parts) == [ENDS, "model.layers.*", "model.layers.*"]


@pytest.mark.parametrize(
    "changes", [{"sliding_window": None}, {"num_attention_heads": 4}], ids=["without windows", "other sizes"]
)
def test_config_values_read_in_forward_change_parts(changes):
    config = tiny_config(CONFIG_MAPPING["mistral"]())
    before = get_features(build_on_meta(config, "MistralForCausalLM")).parts
    for name, value in changes.items():
        setattr(config, name, value)
    after = get_features(build_on_meta(config, "MistralForCausalLM")).parts
    assert (before == after) is ("sliding_window" not in changes)


def test_random_sites_are_found_and_silenced():
    config = tiny_config(CONFIG_MAPPING["gpt2"]())
    assert not random_sites(build_on_meta(config, "GPT2LMHeadModel"))
    assert rates(config) == {"attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"}
    set_rates(config, 0.1, rates(config))
    model = build_on_meta(config, "GPT2LMHeadModel")
    assert {"transformer.drop", "transformer.h.*.attn.attn_dropout"} < random_sites(model)
    model.transformer.h[0].mlp.noise_rate = 0.2
    model.score = nn.Dropout(0.3)
    assert {"score", "transformer.h.*.mlp.noise_rate"} < random_sites(model)
    silence(model)
    assert not random_sites(model)


def test_split_layer_fraction():
    assert get_features(llama()).split > 0.9
    assert get_features(build_on_meta(tiny_config(CONFIG_MAPPING["doge"]()), "DogeForCausalLM")).split < 0.5


# A model whose layer kinds depend on the position in a block; older versions of transformers lack it.
BLOCK_LAYER_TYPES = [("inkling2_text", "Inkling2ForCausalLM")] if hasattr(transformers, "Inkling2ForCausalLM") else []


# A subset that varies with the version of transformers: all classes take a minute.
@pytest.mark.parametrize(
    "model_type, class_name", random.Random(len(RECORDED)).sample(RECORDED, 25) + BLOCK_LAYER_TYPES
)
def test_tiny_model_parts_match_the_full_model(model_type, class_name):
    config = full_config(CONFIG_MAPPING[model_type]())
    full = describe_model(build_on_meta(config, class_name))
    tiny_model = describe_model(build_on_meta(tiny_config(config, 2, find_required_layers(full)), class_name))
    assert tiny_model.features({}).parts == full.features({}).parts


# The embedding table has extra codebook entries.
NEVER_TIED = ("kyutai_speech_to_text",)


@pytest.mark.parametrize(
    "model_type, class_name, tied",
    [(name, of, tied) for name, of in RECORDED for tied in (False, True) if not (tied and name in NEVER_TIED)],
)
def test_tied_weights_have_identical_shardings(model_type, class_name, tied):
    config = tiny_config(CONFIG_MAPPING[model_type]())
    for subconfig in {id(subconfig): subconfig for subconfig in (config, config.get_text_config())}.values():
        subconfig.tie_word_embeddings = tied
    model, loading = (build_on_meta(config, class_name, tie=tie) for tie in (True, False))
    shardings = plan(model, TP2, Axes.of(TP2, 0)).shardings
    assert plan(loading, TP2, Axes.of(TP2, 0)).shardings == shardings
    for name, other in loading.all_tied_weights_keys.items():
        assert (shardings[name].placement, shardings[name].gradient) == (
            shardings[other].placement,
            shardings[other].gradient,
        )


def test_conflicting_tied_shardings_are_rejected():
    model = llama()
    state = plan(model, TP2, Axes.of(TP2, 0)).placed["tp"]
    tied = {"lm_head.weight": "model.norm.weight"}
    with pytest.raises(
        PlanError, match=r"lm_head.weight is tied to model.norm.weight, but their shardings differ: split"
    ):
        assign_shardings(model, state.styles, state.structure, state.head_copies, False, tied)


def test_results_round_trip_through_a_file(tmp_path):
    rows = [row for row in verified.records() if row["model_type"] in ("llama", "gemma2")]
    verified.write_results(tmp_path / "a.json", rows)
    reloaded = verified.read_results((tmp_path / "a.json").read_text("utf-8"))
    for one, other in zip(rows, reloaded, strict=True):
        assert {**one, "parts": set(one["parts"])} == {**other, "parts": set(other["parts"])}


def test_check_command_reproduces_the_parts():
    model = llama(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1)
    words = check_command(model.config, "LlamaForCausalLM", "tp2")
    changes = json.loads(words.split("--set '")[1].rstrip("'"))
    assert (
        get_features(build_on_meta(resolve_config("llama", changes), "LlamaForCausalLM")).parts
        == get_features(model).parts
    )


def test_describe_model_leaves_base_class_unchanged():
    for name in [name for name in vars(PreTrainedModel) if name.endswith("cached_value")]:
        delattr(PreTrainedModel, name)
    _common_attributes.cache_clear()
    describe_model(llama())
    assert not [name for name in vars(PreTrainedModel) if name.endswith("cached_value")]


def test_differences_name_module_and_compared_structure():
    messages = verified.differences(
        "LlamaForCausalLM", "llama", "pp", describe_model(_make_model_with_bias()).features({})
    )
    assert messages == ["model.layers.*: mlp.up_proj: Linear(weight, bias); compared was Linear(weight)"]
    assert verified.differences("NobodyForCausalLM", "llama", "pp", describe_model(llama()).features({})) is None


def _make_model_with_bias():
    model = llama()
    for layer in model.model.layers:
        layer.mlp.up_proj.bias = nn.Parameter(torch.empty(1, device="meta"))
    return model


def test_missing_gradient_is_an_error_unless_expected():
    reference = Measurement(1.0, 1.0, 1.0, {"tower.weight": None, "weight": torch.ones(2)})
    measurement = Measurement(1.0, 1.0, 1.0, {"tower.weight": None, "weight": torch.ones(2)})
    assert any("tower.weight has no gradient" in error.quantity for error in gradient_errors(measurement, reference))
    reference.without = (r"^tower\.",)
    assert all(error.value == 0 for error in gradient_errors(measurement, reference))


def test_check_tasks_and_model_types():
    t5, llava = CONFIG_MAPPING["t5"](), CONFIG_MAPPING["llava"]()
    assert get_class_task("T5ForConditionalGeneration", t5) == "seq2seq"
    assert get_class_task("BartForCausalLM", CONFIG_MAPPING["bart"]()) == "causal"
    assert get_class_task("BertForTokenClassification", t5) == "token_classification"
    assert get_class_task("BertForQuestionAnswering", t5) == "question_answering"
    assert get_class_task("LlavaForConditionalGeneration", llava) == "image"
    assert {"gpt_neo", "codegen", "mamba"} <= set(causal_types())


def test_part_digests_are_distinct():
    assert Part("a", frozenset({"x"})).digest != Part("b", frozenset({"x"})).digest

"""Parity tests of model families: loss, every gradient, the norm, and the weights after two SGD and two AdamW steps.

To add a case, add a line to `CASES`. Run one with `pytest tests/parity -k "gemma2 and tp2"`, or any model type with
`hf-megatron check TYPE --layout tp2,tp2+sp,tp4`.
"""

import dataclasses
import functools

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.core.layouts import parse_layouts
from hf_megatron.testing.parity import check_tiny_model
from hf_megatron.testing.tolerances import WELL_CONDITIONED, judge
from tests.helpers.shared_tiny_models import make_tiny_model

CASES = [
    # model type, layouts, attributes of the tiny config
    ("llama", "tp2,tp2+sp,tp4,tp4+sp", {}),
    ("llama", "tp2,tp2+sp,tp4", {"tie_word_embeddings": True}),
    ("llama", "tp4,tp4+sp", {"num_key_value_heads": 1}),
    ("llama", "tp2,tp2+sp", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "tp4+sp", {"vocab_size": 129}),
    ("bloom", "tp2+sp", {}),
    ("cohere2", "tp2+sp", {}),
    ("deepseek_v3", "tp2+sp,tp4", {}),
    ("falcon", "tp2+sp", {}),
    ("gemma2", "tp2+sp,tp4", {}),
    ("gemma3_text", "tp2+sp", {}),
    ("glm4", "tp2+sp", {}),
    ("gpt2", "tp2,tp2+sp", {}),
    ("gpt_neox", "tp2+sp", {}),
    ("gpt_oss", "tp2+sp,tp4", {}),
    ("granite", "tp2+sp", {}),
    ("granitemoe", "tp2+sp", {}),
    ("llama4_text", "tp2+sp", {}),
    ("mixtral", "tp2+sp,tp4", {}),
    ("olmo2", "tp2+sp", {}),
    ("olmo3", "tp2+sp", {}),
    ("opt", "tp2+sp", {}),
    ("phi", "tp2+sp", {}),
    ("phi3", "tp2+sp", {}),
    ("qwen2", "tp4+sp", {}),
    ("qwen3", "tp4", {}),
    ("qwen3_moe", "tp2+sp,tp4", {}),
    ("stablelm", "tp2+sp", {"qk_layernorm": True, "use_parallel_residual": True}),
    # not causal: the task follows the type
    ("bert", "tp2+sp", {}),
    ("t5", "tp2+sp", {}),
    # Its fixed positions, which no file has, are trained with transformers 5.24.
    ("marian", "tp2", {}),
]
TASKS = {"bert": "masked", "t5": "seq2seq", "marian": "seq2seq"}
# Heads with labels that are not tokens: one class per token, two positions per sequence.
HEADS = [("bert", "token_classification", "tp2"), ("bert", "question_answering", "tp2+sp")]
HEADS += [("bert", "multiple_choice", layout) for layout in ("tp2+sp", "pp2", "dp2")]


@functools.lru_cache(maxsize=4)
def _get_tiny_model(model_type: str, changes: tuple, task: str = ""):
    task = task or TASKS.get(model_type, "causal")
    return make_tiny_model(CONFIG_MAPPING[model_type](), task=task, changes=dict(changes), microbatches=2)


def _flatten_cases():
    for model_type, layouts, changes in CASES:
        for layout in parse_layouts(layouts):
            name = "-".join([model_type, layout.layout(), *(f"{k}={v}" for k, v in changes.items())])
            yield pytest.param(model_type, layout, tuple(changes.items()), id=name)


@pytest.mark.parametrize(("model_type", "layout", "changes"), _flatten_cases())
def test_layouts_match_single_process(model_type, layout, changes):
    comparison = check_tiny_model(_get_tiny_model(model_type, changes), layout)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(("model_type", "task", "layout"), HEADS)
def test_heads_match_single_process(model_type, task, layout):
    comparison = check_tiny_model(_get_tiny_model(model_type, (), task), parse_layouts(layout)[0])
    assert comparison.passed, comparison.report()


def test_missing_gradients_keep_tight_tolerances():
    """A missing gradient must not make the round-off infinite: infinite round-off allows 16 times the tolerance."""
    reference = _get_tiny_model("ernie4_5_moe", (), "causal").reference
    assert reference.without and reference.round_off < WELL_CONDITIONED


def test_zero_gradients_are_judged_as_round_off():
    """Attention is invariant to key biases, so their gradient is round-off; a larger gradient still fails."""
    tiny_model = _get_tiny_model("bert", (), "token_classification")
    reference = tiny_model.reference
    assert {name for name in reference.gradients if name.endswith("key.bias")} == reference.cancelled
    name = min(reference.cancelled)
    largest = max(gradient.abs().max() for gradient in reference.gradients.values() if gradient is not None)
    measurement = dataclasses.replace(reference, gradients=dict(reference.gradients))
    measurement.gradients[name] = reference.gradients[name] + 1e-6 * largest
    assert judge(measurement, reference).passed
    measurement.gradients[name] = reference.gradients[name] + 4e-6 * largest
    assert not judge(measurement, reference).passed

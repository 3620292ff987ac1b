"""Parity with one process: loss, every gradient, its norm, and the weights after two SGD and two AdamW steps.

Adding a case is one line in `CASES`. Run one with `pytest tests/parity -k "gemma2 and tp2"`, or any model type with
`hf-megatron check TYPE --layouts tp2,tp2+sp,tp4`.
"""

import functools

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.verify.check import parse_layouts
from hf_megatron.verify.parity import check_twin, make_twin

CASES = [
    # model type, layouts, attributes of the tiny config
    ("llama", "tp2,tp2+sp,tp4,tp4+sp", {}),
    ("llama", "tp2,tp2+sp,tp4", {"tie_word_embeddings": True}),
    ("llama", "tp4,tp4+sp", {"num_key_value_heads": 1}),
    ("llama", "tp2,tp2+sp", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "tp4+sp", {"vocab_size": 129}),
    ("gemma2", "tp2+sp,tp4", {}),
    ("gemma3_text", "tp2+sp", {}),
    ("cohere2", "tp2+sp", {}),
    ("granite", "tp2+sp", {}),
    ("granitemoe", "tp2+sp", {}),
    ("phi", "tp2+sp", {}),
    ("phi3", "tp2+sp", {}),
    ("glm4", "tp2+sp", {}),
    ("olmo2", "tp2+sp", {}),
    ("olmo3", "tp2+sp", {}),
    ("gpt_neox", "tp2+sp", {}),
    ("qwen2", "tp4+sp", {}),
    ("qwen3", "tp4", {}),
    ("qwen3_moe", "tp2+sp,tp4", {}),
    ("mixtral", "tp2+sp,tp4", {}),
    ("deepseek_v3", "tp2+sp,tp4", {}),
    ("llama4_text", "tp2", {}),
]


@functools.lru_cache(maxsize=4)
def _twin(model_type: str, changes: tuple):
    return make_twin(CONFIG_MAPPING[model_type](), changes=dict(changes), microbatches=2)


def _flat():
    for model_type, layouts, changes in CASES:
        for layout in parse_layouts(layouts):
            name = "-".join([model_type, layout.layout(), *(f"{k}={v}" for k, v in changes.items())])
            yield pytest.param(model_type, layout, tuple(changes.items()), id=name)


@pytest.mark.parametrize(("model_type", "layout", "changes"), _flat())
def test_equals_one_process(model_type, layout, changes):
    comparison = check_twin(_twin(model_type, changes), layout)
    assert comparison.passed, comparison.report()

"""Which modules mix tokens by themselves, found by changing one token of a row."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.config import MegatronConfig
from hf_megatron.core.axes import Axes
from hf_megatron.models.layers import find_layers
from hf_megatron.models.spec import ModelSpec
from hf_megatron.parallelize import plan
from hf_megatron.testing import check
from hf_megatron.testing.token_mixing import find_token_mixing, full_share, unknown_mixing
from tests.helpers.shared_tiny_models import make_tiny_model

CP2 = MegatronConfig(cp_size=2)
# Type -> what mixes tokens beside transformers' attention functions, within a layer.
MIXING = {
    "llama": set(),
    "gemma2": set(),
    "deepseek_v3": set(),
    "qwen3_moe": set(),
    "gpt2": set(),
    "bloom": {"self_attention"},
    "falcon": {"self_attention"},
    "gpt_neo": {"attn"},
    "qwen3_next": {"linear_attn"},
    "jamba": {"mamba"},
    "granitemoehybrid": {"mamba"},
    "minimax": {"self_attn"},
    "kimi_linear": {"self_attn"},
}
# Of these no rank of a row computes a part of the heads; Granite's mixer has one group of states for all of them.
FULL_SEQUENCE = {"bloom", "falcon", "gpt_neo", "granitemoehybrid"}


@functools.lru_cache(maxsize=1)
def load_case(model_type):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=1)
    state = plan(tiny_model.model_on_meta(), CP2, Axes.of(CP2, 0))
    return tiny_model.load(), state, {"input_ids": tiny_model.batches[0]["input_ids"]}


@pytest.mark.parametrize("model_type", MIXING)
def test_mixing_modules_are_detected(model_type):
    model, state, batch = load_case(model_type)
    layers = find_layers(model, state.spec, "cp_size")
    mixing_modules = {name.removeprefix(f"{layers}.").split(".")[1] for name in find_token_mixing(model, batch, layers)}
    assert mixing_modules == MIXING[model_type]
    assert unknown_mixing(model, state.spec, batch) is None
    assert (full_share(model, state) > 0) == (model_type in FULL_SEQUENCE)


def test_token_mixing_layer_fails_check(monkeypatch):
    """A row is no result of context parallelism, however near its numbers are."""
    model, state, batch = load_case("llama")
    stock = type(model.model.layers[0].mlp).forward

    def mixing_forward(self, hidden):
        return stock(self, hidden) + hidden.roll(1, 1)

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", mixing_forward)
    reason = unknown_mixing(model, state.spec, batch)
    assert reason is not None and "model.layers.0.mlp (LlamaMLP)" in reason
    lines = []
    [row] = check.check_models(["llama"], [CP2], echo=lines.append)
    assert not row["passed"] and "tokens are mixed in model.layers.0.mlp" in row["worst"] and "DIFFERS" in lines[0]


def test_full_sequence_share_is_recorded():
    [row] = check.check_models(["bloom"], [CP2], echo=lambda text: None)
    assert row["passed"] and 0.2 < row["whole"] < 0.4


def test_detection_leaves_model_unchanged():
    model, _, batch = load_case("llama")
    before = model.train()(**batch).logits
    find_token_mixing(model, batch, "model.layers")
    assert model.training and torch.equal(model(**batch).logits, before)
    assert unknown_mixing(model, ModelSpec("llama"), batch) is None

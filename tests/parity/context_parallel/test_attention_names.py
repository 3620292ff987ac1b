"""Parity of attention implementations by name: with cp, blocks of attention do not call the one that is named."""

import functools

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.core.layouts import parse_layouts
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model


@functools.lru_cache(maxsize=1)
def get_tiny_model():
    return make_tiny_model(CONFIG_MAPPING["llama"](), task="causal", microbatches=2)


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_name_is_accepted(name, monkeypatch):
    """Flex attention has no backward on CPUs, so its own function cannot have run."""
    tiny_model = get_tiny_model()
    monkeypatch.setattr(tiny_model, "arguments", {"attn_implementation": name})
    comparison = check_tiny_model(tiny_model, parse_layouts("cp2")[0])
    assert comparison.passed, comparison.report()

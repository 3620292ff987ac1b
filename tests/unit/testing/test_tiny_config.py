"""Tests of tiny configs and of parameters that a check excludes."""

import copy
import re

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from hf_megatron.models.type_facts import get_type_facts
from hf_megatron.testing.tiny_config import full_config, tiny_config
from hf_megatron.testing.unread_parameters import without_gradient


@pytest.mark.parametrize("model_type", ["glm4v_moe_text", "qwen2_vl", "gemma3"])
def test_tiny_config_does_not_modify_type_facts(model_type):
    before = copy.deepcopy(get_type_facts(model_type))
    tiny_config(full_config(CONFIG_MAPPING[model_type]()))
    assert get_type_facts(model_type) == before


@pytest.mark.parametrize("model_type", ["llava", "llava_onevision", "aya_vision"])
def test_without_gradient_patterns_match_model_names(model_type):
    config = tiny_config(full_config(CONFIG_MAPPING[model_type]()))
    with torch.device("meta"):
        names = [name for name, _ in AutoModelForImageTextToText.from_config(config).named_parameters()]
    patterns = {pattern for pattern in without_gradient(config, ["images"]) if "tower" in pattern}
    assert patterns and all(any(re.search(pattern, name) for name in names) for pattern in patterns)

"""Tests of the patch table: replacements accept the arguments of upstream functions by name."""

import importlib
import inspect
import os

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from hf_megatron.compat.versions import is_for_other_version
from hf_megatron.integrations.patch_table import PATCHES

# Targets ending in `.func` are closure variables, through which a function is replaced under all its names.
BY_FUNCTION = [patch for patch in PATCHES if not patch.target.endswith(".func")]


def list_parameters(function):
    function = getattr(function, "__func__", function)
    function = function.fget if isinstance(function, property) else function
    return list(inspect.signature(inspect.unwrap(function)).parameters.values())


@pytest.mark.parametrize("patch", BY_FUNCTION, ids=lambda patch: patch.target)
def test_replacements_keep_argument_names(patch, monkeypatch):
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")
    if is_for_other_version(patch.target):
        return
    module, _, path = patch.target.partition(":")
    owner = importlib.import_module(module)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    stock = list_parameters(inspect.getattr_static(owner, name))
    module, _, function = patch.replacement.partition(":")
    replacement = list_parameters(getattr(importlib.import_module(module), function))[1:]
    names = [parameter.name for parameter in stock]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in stock)
    for place, parameter in enumerate(replacement):
        is_receiver = bool(parts) and place == 0
        if is_receiver or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "__getitem__":
            continue
        if parameter.name in names:
            assert parameter.kind is parameter.KEYWORD_ONLY or names.index(parameter.name) == place, parameter
        else:
            assert takes_any, f"stock has no {parameter.name}: {names}"


def test_gemma3_builds_masks_with_keyword_arguments():
    """Gemma 3 calls the mask functions with keyword arguments."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "sliding_window": 4}
    config = Gemma3Config(
        text_config=text,
        vision_config=sizes | {"image_size": 28, "patch_size": 7},
        mm_tokens_per_image=4,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    input_ids = torch.tensor([[5, 60, 60, 60, 60, 7, 8, 9, 10, 11]])
    is_image = input_ids == 60
    loss = model(
        input_ids=input_ids,
        token_type_ids=is_image.long(),
        pixel_values=torch.randn(1, 3, 28, 28),
        labels=input_ids.masked_fill(is_image, -100),
    ).loss
    loss.backward()
    assert loss > 0 and model.model.vision_tower.embeddings.patch_embedding.weight.grad is not None

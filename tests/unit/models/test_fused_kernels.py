"""Tests of the names and settings of fused kernels, and of the description of models that are built of them."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.compat.fused_kernels import is_liger_head, liger_defaults, liger_kernel_name
from hf_megatron.models import fused_kernels
from hf_megatron.models.fingerprint import describe_model
from hf_megatron.models.fused_kernels import choose_liger_kernels, is_shard_safe
from hf_megatron.testing.parity import build, full_config
from tests.helpers.liger_on_cpu import liger_on_cpu


def test_settings_of_a_parallelized_model():
    defaults = {
        "rope": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
        "swiglu": True,
        "layer_norm": True,
    }
    choice = choose_liger_kernels(defaults, {"swiglu": False, "unknown": True})
    assert choice.settings == dict.fromkeys(defaults, False) | {"rope": True}
    assert choice.losses == ("fused_linear_cross_entropy",)
    assert (choice.skipped, choice.rejected) == (("layer_norm",), ())
    assert choose_liger_kernels(defaults, {"layer_norm": True}).rejected == ("layer_norm",)
    assert choose_liger_kernels(defaults, {"cross_entropy": True}).rejected == ()


def test_other_functions_are_no_kernels():
    assert liger_kernel_name(build) is None and not is_liger_head(build) and not is_shard_safe(build)
    assert liger_kernel_name(None) is None


def test_names_exist_in_liger():
    """A name that Liger renames would no longer be recognized."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers import geglu, layer_norm, monkey_patch, relu_squared, rms_norm, rope, swiglu

    modules = (geglu, layer_norm, monkey_patch, relu_squared, rms_norm, rope, swiglu)
    known = {name for module in modules for name in vars(module)}
    assert not {*fused_kernels._SHARD_SAFE, *fused_kernels._OTHERS} - known
    settings = {name for kind in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN for name in liger_defaults(kind)}
    assert {*fused_kernels._SHARD_SAFE.values(), *fused_kernels._LOSSES} <= settings


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "olmo2", "phi3", "qwen2", "qwen3"])
def test_description_is_the_stock_model_s(model_type):
    """A model that is built of Liger's classes has the parity results of the stock classes."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    def describe():
        with torch.device("meta"):
            return describe_model(build(full_config(CONFIG_MAPPING[model_type]()), "causal")).features({})

    stock = describe()
    with liger_on_cpu():
        MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]()
        assert describe() == stock
    assert describe() == stock, "Liger's patches are undone"

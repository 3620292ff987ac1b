"""Tests of per-parameter settings of bitsandbytes' optimizers, which Trainer uses to keep embeddings in 32 bits."""

import bitsandbytes
import pytest
import torch

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import count_ranks, parse_layout
from tests.integration.data_parallel.test_layer_wise import load, train

LAYOUTS = ["dp2+zero0", "tp2", "dp2", "pp2"]


def adamw(model):
    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=256)


def list_state_dtypes(model, optimizer):
    """Returns the dtype of the first moment of each parameter whose state is on this rank."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {names[id(parameter)]: optimizer.state.get(parameter) for parameter in parameters}
    return {name: state["state1"].dtype for name, state in states.items() if state}


def train_with_overrides(tiny, text):
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    model = load(tiny, text)
    manager.register_module_override(model.get_input_embeddings(), "weight", {"optim_bits": 32})
    optimizer = prepare_optimizer(adamw(model))
    name, parameter = next((n, p) for n, p in model.named_parameters() if "layers.1.mlp.up_proj" in n)
    manager.override_config(parameter, "optim_bits", 32)
    train(model, [optimizer], 1)
    return list_state_dtypes(model, optimizer)


@pytest.mark.parametrize("text", LAYOUTS)
def test_overridden_parameters_keep_32_bit_states(tiny, text):
    [expected] = run_ranks(train_with_overrides, 1, tiny, None)
    assert expected["model.embed_tokens.weight"] == expected["model.layers.1.mlp.up_proj.weight"] == torch.float32
    assert expected["model.layers.1.mlp.down_proj.weight"] == torch.uint8
    merged = {}
    for dtypes in run_ranks(train_with_overrides, count_ranks(parse_layout(text)), tiny, text):
        merged |= dtypes
    assert merged == expected


def test_settings_by_position_are_rejected_on_stages(tiny):
    def on_rank():
        model = load(tiny, "pp2")
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        parameters = list(model.parameters())
        manager.override_config(parameters[0], "optim_bits", 32)
        manager.register_parameters(parameters)
        with pytest.raises(UnsupportedError, match=r"Call GlobalOptimManager.override_config alone\."):
            prepare_optimizer(adamw(model))
        manager.initialize()
        manager.override_config(parameters[0], "optim_bits", 32)
        optimizer = prepare_optimizer(adamw(model))
        train(model, [optimizer], 1)
        return list_state_dtypes(model, optimizer).get("model.embed_tokens.weight", torch.float32)

    assert run_ranks(on_rank, 2) == [torch.float32] * 2

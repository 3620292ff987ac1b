"""Bounds on the Python calls that a layer costs; unlike times, counts do not depend on the machine's load."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron import MegatronConfig, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.python_calls import count_calls

# Layout -> calls per layer of forward, backward and optimizer step, with a few calls of reserve.
BOUNDS = {
    "tp2": (MegatronConfig(tp_size=2), (170, 40, 80)),
    "tp2+sp": (MegatronConfig(tp_size=2, sequence_parallel=True), (200, 78, 80)),
    "tp2+sp packed": (
        MegatronConfig(tp_size=2, sequence_parallel=True, shard_saved_activations=True),
        (338, 142, 80),
    ),
    "dp2": (MegatronConfig(dp_size=2), (125, 45, 90)),
}
DEPTHS = (2, 6)


def save_models(path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    for depth in DEPTHS:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=depth, vocab_size=64)).save_pretrained(
            path / str(depth)
        )


def count_phases(path, config):
    """Returns the calls of forward, backward and optimizer in a step after those that check more."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.arange(32).view(2, 16)
    for _ in range(6):
        result = {}
        counts = [count_calls(lambda result=result: result.update(loss=model(input_ids=ids, labels=ids).loss))]
        counts.append(count_calls(result["loss"].backward))
        counts.append(count_calls(lambda: (optimizer.step(), optimizer.zero_grad())))
    return counts


@pytest.mark.parametrize("layout", BOUNDS)
def test_calls_per_layer_are_bounded(tmp_path, layout):
    run_ranks(save_models, 1, tmp_path)
    config, bounds = BOUNDS[layout]
    few, many = (run_ranks(count_phases, 2, tmp_path / str(depth), config)[0] for depth in DEPTHS)
    per_layer = [(more - less) / (DEPTHS[1] - DEPTHS[0]) for less, more in zip(few, many, strict=True)]
    assert all(calls <= bound for calls, bound in zip(per_layer, bounds, strict=True)), per_layer

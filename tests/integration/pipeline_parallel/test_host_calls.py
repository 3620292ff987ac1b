"""Bounds of the Python calls of a pipelined training call, which do not depend on the load of the machine."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.losses.loss_terms import CHECKED_CALLS
from hf_megatron.pipeline_parallel import split_model
from tests.helpers.python_calls import count_calls

DEPTHS = (4, 12)
MICROBATCHES = (4, 8)
# From transformers 5.24 its layers and attention rename arguments, which is four calls per layer of a microbatch.
# Calls on the rank that makes more; stages by hand on `torch.distributed.pipelining` make 201, 87, 106 and 0.
BOUNDS = {"microbatch": 650, "layer of a microbatch": 135, "call": 1550, "layer of a call": 220}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = [tmp_path_factory.mktemp(f"layers{depth}") for depth in DEPTHS]
    for depth, path in zip(DEPTHS, paths, strict=True):
        torch.manual_seed(1)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=depth, vocab_size=64)).save_pretrained(path)
    return paths


def count_training_calls(model, microbatches):
    """Returns the calls of a forward and backward, after the checks of the first calls."""
    ids = torch.arange(16).expand(microbatches, -1)
    for _ in range(CHECKED_CALLS + 1):
        model(input_ids=ids, labels=ids).loss.backward()
    return count_calls(lambda: model(input_ids=ids, labels=ids).loss.backward())


def split_counts(counts):
    """Splits counts by depth and number of microbatches into calls per microbatch, per call and per layer of each."""
    per_microbatch, per_call = [], []
    for few, many in counts:
        per_microbatch.append((many - few) / (MICROBATCHES[1] - MICROBATCHES[0]))
        per_call.append(few - MICROBATCHES[0] * per_microbatch[-1])
    # A rank of two has half of the layers.
    layers = [depth / 2 for depth in DEPTHS]
    found = {}
    for name, (shallow, deep) in {"microbatch": per_microbatch, "call": per_call}.items():
        found[f"layer of a {name}"] = (deep - shallow) / (layers[1] - layers[0])
        found[name] = shallow - layers[0] * found[f"layer of a {name}"]
    return found


@pytest.mark.parametrize("fault", [False, True])
def test_calls_per_microbatch_and_layer_are_bounded(folders, fault):
    """With the fault, a check of every call walks the model with `named_parameters()`."""

    def on_rank():
        if fault:
            split_model.list_named_parameters = lambda model: dict(model.named_parameters())
        layout = {"pp_size": 2, "num_microbatches": MICROBATCHES[1], "pipeline_schedule": "1f1b"}
        counts = []
        for path in folders:
            model = AutoModelForCausalLM.from_pretrained(path, megatron_config=layout).train()
            counts.append([count_training_calls(model, microbatches) for microbatches in MICROBATCHES])
        return split_counts(counts)

    for found in run_ranks(on_rank, 2):
        above = {name for name, bound in BOUNDS.items() if found[name] > bound}
        assert above == ({"layer of a call"} if fault else set()), found

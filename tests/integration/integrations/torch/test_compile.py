"""Tests of torch.compile on the layers: no graph breaks inside a layer, and parity."""

import torch
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


def test_compiled_layers_match_single_process():
    tiny_model = make_tiny_model(CONFIG_MAPPING["qwen3"]())
    [layout] = parse_layouts("tp2+sp")
    comparison = check_tiny_model(tiny_model, layout, prepare=compile_layers, timeout=300)
    assert comparison.passed, comparison.report()


def test_no_graph_breaks():
    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"]())

    def on_rank():
        model = tiny_model.load(megatron_config=ConfigUnderTest(tp_size=2)).train()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        torch._dynamo.reset()
        counters.clear()
        model(**tiny_model.batches[0]).loss.backward()
        return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]

    for breaks, graphs in run_ranks(on_rank, 2, timeout=300):
        assert breaks == 0 and graphs >= 1

"""Tests of compiled layers: a constant number of graphs, no breaks inside a layer, and parity."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.context_parallel import compiled_attention
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.compiled_graphs import EXPECTED, count_graphs, save_model
from tests.helpers.shared_tiny_models import make_tiny_model


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


def compile_layers_with_breaks(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


@pytest.mark.parametrize("model_type", ["qwen3"])
@pytest.mark.parametrize("layout", ["tp2", "tp2+sp", "cp2", "dp2", "pp2"])
def test_compiled_layers_match_single_process(model_type, layout):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type]())
    [layout] = parse_layouts(layout)
    comparison = check_tiny_model(tiny_model, layout, prepare=compile_layers, timeout=600)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", ["tp2", "ep2"])
def test_compiled_moe_layers_match_single_process(layout):
    tiny_model = make_tiny_model(CONFIG_MAPPING["mixtral"]())
    [layout] = parse_layouts(layout)
    comparison = check_tiny_model(tiny_model, layout, prepare=compile_layers_with_breaks, timeout=600)
    assert comparison.passed, comparison.report()


def compile_layers_that_run_eagerly(model):
    """As beyond the compiler's limit of recompilations, and with TORCH_COMPILE_DISABLE=1."""
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    torch.compiler.set_stance("force_eager")


@pytest.mark.parametrize("text", ["tp2+sp", "tp4+sp", "cp2", "dp2+zero3", "pp2"])
def test_compiled_layers_that_run_eagerly_match_single_process(text):
    """With tp4, two ranks hold the same key/value heads and sum their gradients."""
    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"]())
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, layout, prepare=compile_layers_that_run_eagerly)
    assert comparison.passed, comparison.report()


def test_wrong_compiled_attention_is_detected(monkeypatch):
    """Without the mask's offsets, compiled attention of split sequences would be causal within a rank's tokens."""
    real = compiled_attention.attend_to_split_sequence

    def attend(query, key, value, *args):
        return real(query, key, value.flip(2), *args)

    monkeypatch.setattr(compiled_attention, "attend_to_split_sequence", attend)
    tiny_model = make_tiny_model(CONFIG_MAPPING["qwen3"]())
    [layout] = parse_layouts("cp2")
    assert not check_tiny_model(tiny_model, layout, prepare=compile_layers, timeout=600).passed


@pytest.mark.parametrize(("layout", "kind", "recompute"), list(EXPECTED))
def test_number_of_graphs_does_not_grow_with_the_layers(layout, kind, recompute, tmp_path):
    run_ranks(save_model, 1, kind, str(tmp_path))
    expected_graphs, most_breaks = EXPECTED[layout, kind, recompute]
    for graphs, breaks in count_graphs(layout, kind, recompute, str(tmp_path)):
        assert graphs == expected_graphs and breaks <= most_breaks


def test_compiled_attention_keeps_no_graph_after_its_tensors():
    from hf_megatron.core.runtime import RUNTIME, keep_by_number

    number = torch.tensor([7])
    keep_by_number(RUNTIME.attention_graphs, number, "graph")
    saved = number.view(1)
    del number
    assert RUNTIME.attention_graphs[7] == "graph"
    del saved
    assert 7 not in RUNTIME.attention_graphs

"""What crosses boundaries of stages beside hidden states: values and arguments of layers, shared keys and values."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel.executor import Execution
from hf_megatron.pipeline_parallel.stage_payload import StagePayload
from hf_megatron.tensor_parallel import region
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

# What a default config leaves out.
CHANGES = {
    "gemma4_text": {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10},
    "gemma3n_text": {},
    # The first layer of each three chooses the tokens that the others read.
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "shared"] * 26},
    "hy_v4": {},
    "bamba": {},
    # Some layers read images, of which later stages are given the states.
    "mllama": {},
}


@functools.lru_cache(maxsize=1)
def tiny_model(model_type):
    config = CONFIG_MAPPING[model_type](**CHANGES[model_type])
    task = "image" if model_type == "mllama" else "causal"
    return make_tiny_model(config, task=task, microbatches=2, min_layers=3)


def cuts(model_type, stages=2):
    layers = tiny_model(model_type).config.get_text_config().num_hidden_layers
    for first in range(1, layers - stages + 2):
        rest = layers - first
        yield (first, *(rest // (stages - 1) + (i < rest % (stages - 1)) for i in range(stages - 1)))


@pytest.mark.parametrize("model_type", CHANGES)
def test_every_cut_equals_one_process(model_type):
    for partition in cuts(model_type):
        comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(pp_size=2, pipeline_partition=partition))
        assert comparison.passed, (partition, comparison.report())


@pytest.mark.parametrize("model_type", ["gemma4_text", "glm_moe_dsa"])
def test_stages_between_pass_on(model_type):
    for partition in list(cuts(model_type, 3))[::3]:
        layout = ConfigUnderTest(pp_size=3, pipeline_partition=partition, num_microbatches=3)
        comparison = check_tiny_model(tiny_model(model_type), layout)
        assert comparison.passed, (partition, comparison.report())


@pytest.mark.parametrize("model_type", ["hy_v4", "gemma3n_text"])
def test_streams_after_tokens_and_before_rows_are_split_by_tokens(model_type):
    """`[batch, sequence, streams, hidden]` of hyper-connections, `[streams, batch, sequence, hidden]` of AltUp."""
    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    comparison = check_tiny_model(tiny_model(model_type), layout)
    assert comparison.passed, comparison.report()

    def sabotage():
        get_token_dim = region.SequenceStack.get_token_dim
        region.SequenceStack.get_token_dim = lambda self, tensor: get_token_dim(self, tensor) % 2 + 1

    with pytest.raises(RankError):
        check_tiny_model(tiny_model(model_type), layout, sabotage=sabotage)


@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2, "pipeline_schedule": "zbv"},
        {"pp_size": 2, "pipeline_schedule": "interleaved_1f1b", "recompute": "full"},
        {"pp_size": 2, "tp_size": 2},
        {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
        {"pp_size": 2, "dp_size": 2},
    ],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
@pytest.mark.parametrize("model_type", ["gemma4_text", "hy_v4"])
def test_layouts_equal_one_process(model_type, layout):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("model_type", "use_cache"),
    [("gemma4_text", True), ("gemma3n_text", True), ("glm_moe_dsa", True), ("bamba", False)],
)
def test_generation_equals_one_process(model_type, use_cache):
    """Keys and values that cross grow from step to step."""
    model_tiny_model = tiny_model(model_type)
    ids = model_tiny_model.batches[0]["input_ids"][:2, :6]

    def generate(**layout):
        model = model_tiny_model.load(**layout).eval()
        return model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=use_cache)

    [expected] = run_ranks(generate, 1)
    for found in run_ranks(generate, 2, megatron_config=ConfigUnderTest(pp_size=2)):
        assert torch.equal(found, expected)


def drop_gradients_of_crossings():
    original = Execution._hand_back

    def hidden_states_alone(self, cell, inputs):
        for other in inputs[1:]:
            other.grad = None
        original(self, cell, inputs)

    Execution._hand_back = hidden_states_alone


def swap_arguments():
    original = StagePayload.from_message.__func__

    def from_message(cls, message):
        found = original(cls, message)
        found.arguments = dict(zip(found.arguments, reversed(found.arguments.values()), strict=True))
        return found

    StagePayload.from_message = classmethod(from_message)


@pytest.mark.parametrize("fault", [drop_gradients_of_crossings, swap_arguments])
def test_faults_are_found(fault):
    model_type = "gemma4_text"
    layers = tiny_model(model_type).config.get_text_config().num_hidden_layers
    layout = ConfigUnderTest(pp_size=2, pipeline_partition=(2, layers - 2))
    assert not check_tiny_model(tiny_model(model_type), layout, sabotage=fault).passed


def test_one_tensor_goes_once_and_keeps_its_places():
    hidden, shared, chosen = torch.zeros(1, 2, 3), torch.ones(2), torch.arange(2)
    sent = StagePayload(
        values={1: chosen},
        arguments={("states", layer): shared for layer in (3, 4)},
        entries={("kept", "full"): (shared, chosen), ("kept", 2): hidden},
    )
    message = sent.message(hidden)
    assert len(message.tensors) == 4
    found = StagePayload.from_message(message)
    assert found.values[1] is chosen
    assert [found.arguments["states", layer] is shared for layer in (3, 4)] == [True, True]
    assert found.entries["kept", "full"][0] is shared and found.entries["kept", "full"][1] is chosen
    assert found.entries["kept", 2] is hidden
    assert StagePayload(logits=[shared]).message(hidden).layout == ""


def test_a_type_without_a_backward_in_two_steps_is_refused_by_name():
    layout = ConfigUnderTest(pp_size=2, pipeline_schedule="zbv")
    with pytest.raises(RankError, match="'gemma3n_text' does not support a split backward: each of its layers"):
        check_tiny_model(tiny_model("gemma3n_text"), layout)

"""Tests of stage payloads: layer values, layer arguments and shared keys and values sent along with hidden states."""

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

# Config changes that enable features the default config disables.
CHANGES = {
    "gemma4_text": {"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10},
    "gemma3n_text": {},
    # The first of every three layers selects the tokens that the other two attend to.
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "shared"] * 26},
    "hy_v4": {},
    "bamba": {},
    # Cross-attention layers read image states, which later stages receive.
    "mllama": {},
}


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    config = CONFIG_MAPPING[model_type](**CHANGES[model_type])
    task = "image" if model_type == "mllama" else "causal"
    return make_tiny_model(config, task=task, microbatches=2, min_layers=3)


def iter_partitions(model_type, stages=2):
    layers = get_tiny_model(model_type).config.get_text_config().num_hidden_layers
    for first in range(1, layers - stages + 2):
        rest = layers - first
        yield (first, *(rest // (stages - 1) + (i < rest % (stages - 1)) for i in range(stages - 1)))


@pytest.mark.parametrize("model_type", CHANGES)
def test_every_partition_matches_single_process(model_type):
    for partition in iter_partitions(model_type):
        comparison = check_tiny_model(
            get_tiny_model(model_type), ConfigUnderTest(pp_size=2, pipeline_partition=partition)
        )
        assert comparison.passed, (partition, comparison.report())


@pytest.mark.parametrize("model_type", ["gemma4_text", "glm_moe_dsa"])
def test_middle_stages_forward_the_payload(model_type):
    for partition in list(iter_partitions(model_type, 3))[::3]:
        layout = ConfigUnderTest(pp_size=3, pipeline_partition=partition, num_microbatches=3)
        comparison = check_tiny_model(get_tiny_model(model_type), layout)
        assert comparison.passed, (partition, comparison.report())


@pytest.mark.parametrize("model_type", ["hy_v4", "gemma3n_text"])
def test_hidden_state_streams_shard_over_tokens(model_type):
    """Covers `[batch, sequence, streams, hidden]` (hyper-connections), `[streams, batch, sequence, hidden]` (AltUp)."""
    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    comparison = check_tiny_model(get_tiny_model(model_type), layout)
    assert comparison.passed, comparison.report()

    def use_wrong_token_dim():
        get_token_dim = region.SequenceStack.get_token_dim
        region.SequenceStack.get_token_dim = lambda self, tensor: get_token_dim(self, tensor) % 2 + 1

    with pytest.raises(RankError):
        check_tiny_model(get_tiny_model(model_type), layout, sabotage=use_wrong_token_dim)


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
def test_layouts_match_single_process(model_type, layout):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("model_type", "use_cache"),
    [("gemma4_text", True), ("gemma3n_text", True), ("glm_moe_dsa", True), ("bamba", False)],
)
def test_generation_matches_single_process(model_type, use_cache):
    """Shared keys and values that cross stages grow with every decoding step."""
    tiny_model = get_tiny_model(model_type)
    ids = tiny_model.batches[0]["input_ids"][:2, :6]

    def generate(**layout):
        model = tiny_model.load(**layout).eval()
        return model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, use_cache=use_cache)

    [expected] = run_ranks(generate, 1)
    for tokens in run_ranks(generate, 2, megatron_config=ConfigUnderTest(pp_size=2)):
        assert torch.equal(tokens, expected)


def drop_payload_gradients():
    original = Execution._hand_back

    def hand_back_hidden_states_only(self, cell, inputs):
        for other in inputs[1:]:
            other.grad = None
        original(self, cell, inputs)

    Execution._hand_back = hand_back_hidden_states_only


def swap_arguments():
    original = StagePayload.from_message.__func__

    def from_message(cls, message):
        payload = original(cls, message)
        payload.arguments = dict(zip(payload.arguments, reversed(payload.arguments.values()), strict=True))
        return payload

    StagePayload.from_message = classmethod(from_message)


@pytest.mark.parametrize("fault", [drop_payload_gradients, swap_arguments])
def test_seeded_faults_are_detected(fault):
    model_type = "gemma4_text"
    layers = get_tiny_model(model_type).config.get_text_config().num_hidden_layers
    layout = ConfigUnderTest(pp_size=2, pipeline_partition=(2, layers - 2))
    assert not check_tiny_model(get_tiny_model(model_type), layout, sabotage=fault).passed


def test_shared_tensors_are_sent_once():
    hidden, shared, chosen = torch.zeros(1, 2, 3), torch.ones(2), torch.arange(2)
    sent = StagePayload(
        values={1: chosen},
        arguments={("states", layer): shared for layer in (3, 4)},
        entries={("kept", "full"): (shared, chosen), ("kept", 2): hidden},
    )
    message = sent.message(hidden)
    assert len(message.tensors) == 4
    received = StagePayload.from_message(message)
    assert received.values[1] is chosen
    assert [received.arguments["states", layer] is shared for layer in (3, 4)] == [True, True]
    assert received.entries["kept", "full"][0] is shared and received.entries["kept", "full"][1] is chosen
    assert received.entries["kept", 2] is hidden
    assert StagePayload(logits=[shared]).message(hidden).layout == ""


def test_unsupported_split_backward_raises():
    layout = ConfigUnderTest(pp_size=2, pipeline_schedule="zbv")
    with pytest.raises(RankError, match="'gemma3n_text' does not support a split backward: each of its layers"):
        check_tiny_model(get_tiny_model("gemma3n_text"), layout)

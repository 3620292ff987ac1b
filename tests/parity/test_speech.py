"""Models of speech with an encoder and a decoder: clips go with their rows, convolutions stay on the first stage."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.errors import RankError
from hf_megatron.integrations.gate import ConfigUnderTest
from hf_megatron.pipeline_parallel import microbatches
from hf_megatron.tensor_parallel import local_sizes
from hf_megatron.verify import measure
from hf_megatron.verify.parity import check_twin
from hf_megatron.verify.ranks import run_ranks
from tests.shared_twins import make_twin


@functools.lru_cache(maxsize=1)
def twin(model_type):
    return make_twin(CONFIG_MAPPING[model_type](), task="speech", microbatches=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2, "sequence_parallel": True},
        {"pp_size": 2},
        {"pp_size": 2, "pipeline_partition": (1, 5)},
        {"pp_size": 2, "pipeline_partition": (5, 1)},
        {"pp_size": 2, "dp_size": 2},
        {"pp_size": 2, "tp_size": 2, "pipeline_schedule": "interleaved_1f1b"},
    ],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
def test_whisper_equals_one_process(layout):
    comparison = check_twin(twin("whisper"), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


def test_clips_of_unequal_lengths_and_labels_that_are_not_shifted():
    """Moonshine takes a mask over samples, and hands its labels to the loss as shifted ones."""
    batch = twin("moonshine").batches[0]
    assert not bool(batch["attention_mask"].all())
    comparison = check_twin(twin("moonshine"), ConfigUnderTest(pp_size=2))
    assert comparison.passed, comparison.report()


def heads_of_all_ranks():
    local_sizes.LocalConfig.__getattr__ = lambda self, name: getattr(vars(self)["_whole"], name)


def test_heads_of_a_config_are_this_ranks():
    """Moonshine's attention has no count of its own, and its config is that of all layers."""
    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    comparison = check_twin(twin("moonshine"), layout)
    assert comparison.passed, comparison.report()
    with pytest.raises(RankError, match="is invalid for input of size"):
        check_twin(twin("moonshine"), layout, sabotage=heads_of_all_ranks)


def test_single_numbers_are_read_whole():
    """Moonshine Streaming compresses samples by a parameter without dims."""
    comparison = check_twin(twin("moonshine_streaming"), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()
    with pytest.raises(RankError, match="makes the mask that layers on all stages read"):
        check_twin(twin("moonshine_streaming"), ConfigUnderTest(pp_size=2))


def test_projections_behind_an_encoder():
    """Cohere's decoder projects the encoder's states by a module that it defines behind its layers."""
    model = twin("cohere_asr").model_on_meta()
    layers = len(model.get_encoder().layers) + len(model.get_decoder().layers)
    for partition in ((1, layers - 1), (layers - 1, 1)):
        comparison = check_twin(twin("cohere_asr"), ConfigUnderTest(pp_size=2, pipeline_partition=partition))
        assert comparison.passed, comparison.report()


def training_norms():
    measure.batch_norms = lambda model: []


def test_norms_of_batches_are_frozen_where_batches_are_split():
    """Canary's conformers take statistics of a batch, in one process and on tp; on pipelines only frozen ones run."""
    comparison = check_twin(twin("canary"), ConfigUnderTest(pp_size=2))
    assert comparison.passed, comparison.report()
    assert abs(twin("canary").frozen_norms.loss - twin("canary").reference.loss) > 1e-3
    with pytest.raises(RankError, match="takes the statistics of a batch"):
        check_twin(twin("canary"), ConfigUnderTest(pp_size=2), sabotage=training_norms)


def test_a_table_of_distances_that_all_heads_read():
    """Each rank's heads give SpeechT5's table a part of its gradient."""
    comparison = check_twin(twin("speecht5"), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


def test_whisper_writes_what_one_process_writes():
    features = twin("whisper").batches[0]["input_features"]

    def generate(**layout):
        model = twin("whisper").load(**layout).eval()
        config = model.generation_config
        config.update(decoder_start_token_id=1, pad_token_id=0, eos_token_id=None, forced_decoder_ids=None)
        config.update(suppress_tokens=None, begin_suppress_tokens=None)
        return [model.generate(features, max_new_tokens=6, do_sample=False, **way) for way in ({}, {"num_beams": 3})]

    [expected] = run_ranks(generate, 1)
    for found in run_ranks(generate, 2, megatron_config=ConfigUnderTest(pp_size=2)):
        assert all(map(torch.equal, found, expected))


def clips_of_other_rows():
    original = microbatches._rows

    def rows(name, tensor, count, part):
        return original(name, tensor.flip(0) if name == "input_features" else tensor, count, part)

    microbatches._rows = rows


def test_a_fault_is_found():
    assert not check_twin(twin("whisper"), ConfigUnderTest(pp_size=2), sabotage=clips_of_other_rows).passed

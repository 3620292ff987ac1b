"""Parity tests of audio inputs, with images if a model supports both: samples with no, one and two clips."""

import functools

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.models import verified
from hf_megatron.models.modalities import sample_index
from hf_megatron.models.type_facts import get_type_facts
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel import microbatches
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.structure import ROOT


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    config = CONFIG_MAPPING[model_type](**get_type_facts(model_type).audio)
    return make_tiny_model(config, task="audio", microbatches=2, min_layers=4, batch_size=4)


LAYOUTS = {
    "qwen2_5_omni_thinker": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    "gemma4_unified": {"pp_size": 2, "num_microbatches": 4},
    "glmasr": {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_match_single_process(model_type):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]))
    assert comparison.passed, comparison.report()


def test_audio_from_wrong_sample_is_detected():
    """Seeded fault: clips swapped between samples, with unchanged numbers of clips and placeholders."""
    original = sample_index.samples_with_audio

    def swap_audio_inputs():
        def swap_samples(arguments, rows, config):
            audio_inputs = original(arguments, rows, config)
            return audio_inputs | ({"input_features": audio_inputs["input_features"].flip(0)} if audio_inputs else {})

        sample_index.samples_with_audio = swap_samples

    layout = ConfigUnderTest(pp_size=2, num_microbatches=2)
    comparison = check_tiny_model(get_tiny_model("glmasr"), layout, sabotage=swap_audio_inputs)
    assert not comparison.passed and comparison.worst.value > 10


def swap_audio_between_samples():
    original = microbatches._rows

    def slice_flipped_audio(name, tensor, count, part):
        return original(name, tensor.flip(0) if name == "input_features" else tensor, count, part)

    microbatches._rows = slice_flipped_audio


def test_audio_added_to_token_embeddings():
    voxtral = make_tiny_model(CONFIG_MAPPING["voxtral_realtime"](), task="audio", microbatches=2)
    for layout in ({"pp_size": 2}, {"tp_size": 2, "sequence_parallel": True}):
        comparison = check_tiny_model(voxtral, ConfigUnderTest(**layout))
        assert comparison.passed, comparison.report()
    assert not check_tiny_model(voxtral, ConfigUnderTest(pp_size=2), sabotage=swap_audio_between_samples).passed


def test_pipeline_audio_for_unverified_types_raises(monkeypatch):
    records = tuple(row | {"modalities": ["images"]} for row in verified.records())
    monkeypatch.setattr(verified, "records", lambda: records)
    glmasr = get_tiny_model("glmasr")

    def call():
        model = glmasr.load(megatron_config=MegatronConfig(pp_size=2, num_microbatches=2))
        model(**glmasr.batches[0])

    with pytest.raises(RankError, match=r"input_features: .*audio of verified model types"):
        run_ranks(call, 2)


def test_frozen_weight_in_checkpoint_is_trainable():
    """As in a single process, where the loader replaces the frozen parameter with a new one."""
    voxtral = make_tiny_model(CONFIG_MAPPING["voxtral"](audio_token_id=24), task="audio", microbatches=1)
    frozen = "model.audio_tower.embed_positions.weight"
    assert voxtral.load().get_parameter(frozen).requires_grad

    def get_requires_grad():
        model = voxtral.load(megatron_config=ConfigUnderTest(tp_size=2))
        return model.get_parameter(frozen).requires_grad

    assert run_ranks(get_requires_grad, 2) == [True, True]


def test_docs_list_verified_audio_types():
    compared = {}
    for row in verified.records():
        if row["passed"] and "audio" in row.get("modalities", ()):
            compared.setdefault(row["model_type"], set()).add(row["layout"])
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    stated = page.partition("Audio was compared")[2].partition("\n\n")[0]
    listed = set(stated.split("`")[1::2])
    assert listed == {name for name, layouts in compared.items() if layouts >= {"tp", "tp+sp", "pp"}} and listed

"""Sounds, beside images where a model takes both: rows with one clip, two and none, of unequal lengths."""

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
def tiny_model(model_type):
    config = CONFIG_MAPPING[model_type](**get_type_facts(model_type).audio)
    return make_tiny_model(config, task="audio", microbatches=2, min_layers=4, batch_size=4)


LAYOUTS = {
    "qwen2_5_omni_thinker": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    "gemma4_unified": {"pp_size": 2, "num_microbatches": 4},
    "glmasr": {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_equal_one_process(model_type):
    comparison = check_tiny_model(tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]))
    assert comparison.passed, comparison.report()


def test_audio_of_another_sample_is_found():
    """The seeded fault: with as many clips and placeholders."""
    original = sample_index.samples_with_audio

    def sabotage():
        def of_other(arguments, rows, config):
            found = original(arguments, rows, config)
            return found | ({"input_features": found["input_features"].flip(0)} if found else {})

        sample_index.samples_with_audio = of_other

    layout = ConfigUnderTest(pp_size=2, num_microbatches=2)
    comparison = check_tiny_model(tiny_model("glmasr"), layout, sabotage=sabotage)
    assert not comparison.passed and comparison.worst.value > 10


def clips_of_other_rows():
    original = microbatches._rows

    def rows(name, tensor, count, part):
        return original(name, tensor.flip(0) if name == "input_features" else tensor, count, part)

    microbatches._rows = rows


def test_clips_that_are_added_to_the_tokens_of_their_rows():
    voxtral = make_tiny_model(CONFIG_MAPPING["voxtral_realtime"](), task="audio", microbatches=2)
    for layout in ({"pp_size": 2}, {"tp_size": 2, "sequence_parallel": True}):
        comparison = check_tiny_model(voxtral, ConfigUnderTest(**layout))
        assert comparison.passed, comparison.report()
    assert not check_tiny_model(voxtral, ConfigUnderTest(pp_size=2), sabotage=clips_of_other_rows).passed


def test_pipelines_refuse_audio_of_types_that_were_not_compared_with_them(monkeypatch):
    rows = tuple(row | {"modalities": ["images"]} for row in verified.records())
    monkeypatch.setattr(verified, "records", lambda: rows)
    glmasr = tiny_model("glmasr")

    def call():
        model = glmasr.load(megatron_config=MegatronConfig(pp_size=2, num_microbatches=2))
        model(**glmasr.batches[0])

    with pytest.raises(RankError, match=r"input_features: .*audio of verified model types"):
        run_ranks(call, 2)


def test_a_weight_that_the_class_froze_is_trained_where_a_file_has_it():
    """As in one process, where the loader puts a new parameter in the place of the frozen one."""
    voxtral = make_tiny_model(CONFIG_MAPPING["voxtral"](audio_token_id=24), task="audio", microbatches=1)
    frozen = "model.audio_tower.embed_positions.weight"
    assert voxtral.load().get_parameter(frozen).requires_grad

    def flags():
        model = voxtral.load(megatron_config=ConfigUnderTest(tp_size=2))
        return model.get_parameter(frozen).requires_grad

    assert run_ranks(flags, 2) == [True, True]


def test_the_page_names_the_types_that_were_compared_with_audio():
    compared = {}
    for row in verified.records():
        if row["passed"] and "audio" in row.get("modalities", ()):
            compared.setdefault(row["model_type"], set()).add(row["layout"])
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    stated = page.partition("Audio was compared")[2].partition("\n\n")[0]
    named = set(stated.split("`")[1::2])
    assert named == {name for name, layouts in compared.items() if layouts >= {"tp", "tp+sp", "pp"}} and named

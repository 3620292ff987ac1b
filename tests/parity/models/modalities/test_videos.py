"""Parity tests of video inputs together with images: samples with no, one and two videos, full or frame by frame."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.models import verified
from hf_megatron.models.modalities import sample_index
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.multimodal_batch import make_multimodal_batch
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.structure import ROOT


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="video", microbatches=2, min_layers=4, batch_size=4)


LAYOUTS = {
    "qwen2_vl": {"pp_size": 2, "num_microbatches": 4},
    "qwen3_vl": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    "llava_onevision": {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_match_single_process(model_type):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]))
    assert comparison.passed, comparison.report()


def test_videos_from_wrong_sample_are_detected():
    """Seeded fault: videos swapped between samples, with unchanged sizes and placeholders."""
    original = sample_index.rows_with_videos

    def swap_video_inputs():
        def swap_samples(arguments, rows, config):
            video_inputs = original(arguments, rows, config)
            return video_inputs | (
                {"pixel_values_videos": video_inputs["pixel_values_videos"].flip(0)} if video_inputs else {}
            )

        sample_index.rows_with_videos = swap_samples

    layout = ConfigUnderTest(pp_size=2, num_microbatches=2)
    comparison = check_tiny_model(get_tiny_model("llava_onevision"), layout, sabotage=swap_video_inputs)
    assert not comparison.passed and comparison.worst.value > 10


def test_types_without_video_inputs_raise():
    """No tiny model is built, instead of a comparison without videos."""
    with pytest.raises(ValueError, match="accepts no videos in a known format"):
        make_tiny_model(CONFIG_MAPPING["gemma3"](), task="video")


def test_pipeline_videos_for_unverified_types_raises(monkeypatch):
    records = tuple(row | {"modalities": ["images"]} for row in verified.records())
    monkeypatch.setattr(verified, "records", lambda: records)
    llava = get_tiny_model("llava_onevision")

    def call():
        model = llava.load(megatron_config=MegatronConfig(pp_size=2, num_microbatches=2))
        model(**llava.batches[0])

    with pytest.raises(RankError, match=r"pixel_values_videos: .*audio of verified model types"):
        run_ranks(call, 2)


def test_video_batch_with_ignored_videos_raises():
    """The batch builder rejects a model whose output does not depend on its videos."""
    model = get_tiny_model("llava_onevision").load()
    original = type(model).forward

    class Blind(type(model)):
        @functools.wraps(original)
        def forward(self, *args, pixel_values_videos=None, **kwargs):
            zeros = None if pixel_values_videos is None else torch.zeros_like(pixel_values_videos)
            return original(self, *args, pixel_values_videos=zeros, **kwargs)

    model.__class__ = Blind
    with pytest.raises(ValueError, match="does not depend on them"):
        make_multimodal_batch(model, videos=True)


def test_docs_list_verified_video_types():
    compared = {}
    for row in verified.records():
        if row["passed"] and "videos" in row.get("modalities", ()):
            compared.setdefault(row["model_type"], set()).add(row["layout"])
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    stated = page.partition("Videos were compared")[2].partition("\n\n")[0]
    listed = set(stated.split("`")[1::2])
    assert listed == {name for name, layouts in compared.items() if layouts >= {"tp", "tp+sp", "pp"}} and listed

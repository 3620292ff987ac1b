"""Tests of off-stage images: the inputs of later stages for models that require images."""

import pytest

from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel import off_stage_images
from hf_megatron.testing.parity import check_tiny_model
from tests.parity.models.modalities.test_images import PIPELINES, format_layout, get_tiny_model

# Image features are a layer argument, are cross-attended in every layer, replace masked tokens, precede the text.
TYPES = ("blip-2", "blip", "kosmos-2", "git")


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("layout", PIPELINES, ids=format_layout)
def test_layouts_match_single_process(model_type, layout):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", ["blip-2", "kosmos-2"])
def test_dropped_image_features_are_detected(model_type):
    """Seeded fault: the first stage gets the arguments of a stage without the vision encoder."""

    def use_text_only_arguments():
        original = off_stage_images.OffStageImages.arguments
        off_stage_images.OffStageImages.arguments = lambda images, given, stage, **kw: original(images, given, 1, **kw)

    comparison = check_tiny_model(
        get_tiny_model(model_type), ConfigUnderTest(pp_size=2, num_microbatches=2), sabotage=use_text_only_arguments
    )
    assert not comparison.passed and comparison.worst.value > 10

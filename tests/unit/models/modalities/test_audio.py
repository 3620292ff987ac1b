"""Sounds go with the rows in which their placeholders stand."""

import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen2AudioConfig

from hf_megatron import ConfigError, UnsupportedError
from hf_megatron.models.modalities.images import without_pixels
from hf_megatron.models.modalities.sample_index import multimodal_samples
from hf_megatron.pipeline_parallel.microbatches import split

SOUND, IMAGE = 9, 8
# A clip of two tokens, then one of three and one of two with nothing in between, then none.
ROWS = [
    [1, SOUND, SOUND, 2, 3, 4, 5],
    [1, SOUND, SOUND, SOUND, SOUND, SOUND, 2],
    [1, 2, 3, 4, 5, 6, 7],
]
CONFIG = Qwen2AudioConfig(audio_token_index=SOUND)


def clips():
    return {
        "input_ids": torch.tensor(ROWS),
        "input_features": torch.arange(24.0).view(3, 2, 4),
        "feature_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]]),
    }


def test_clips_of_unequal_lengths_without_text_between_them():
    first, second, third = split(clips(), 3, CONFIG)
    assert first["input_features"].flatten().tolist() == list(range(8))
    assert second["input_features"].flatten().tolist() == list(range(8, 24))
    assert second["feature_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert third.keys() == {"input_ids"}


def test_two_samples_of_a_batch():
    found = multimodal_samples(clips(), slice(1, 3), CONFIG)
    assert len(found["input_features"]) == len(found["feature_attention_mask"]) == 2


def test_audio_with_images():
    ids = torch.tensor(ROWS)
    ids[2, 3] = IMAGE
    config = CONFIG_MAPPING["gemma4"](audio_token_id=SOUND, image_token_id=IMAGE)
    batch = clips() | {"input_ids": ids, "pixel_values": torch.ones(1, 3, 2, 2)}
    batch["input_features_mask"] = batch.pop("feature_attention_mask")
    first, second, third = split(batch, 3, config)
    assert len(first["input_features"]) == 1 and len(second["input_features_mask"]) == 2
    assert third.keys() == {"input_ids", "pixel_values"}


def test_later_stages_are_given_lengths_alone():
    assert without_pixels(clips()).keys() == {"input_ids", "feature_attention_mask"}


def test_placeholders_that_fit_no_clip_are_refused():
    batch = clips() | {"input_ids": torch.tensor([[1, SOUND, SOUND, SOUND], [SOUND, 1, 1, 1], [1, 1, 1, 1]])}
    with pytest.raises(ConfigError, match=r"4 audio clip placeholders, but its 3 audio clips"):
        split(batch, 3, CONFIG)


def test_audio_that_was_not_compared_is_refused():
    with pytest.raises(UnsupportedError, match=r"input_features: .*audio of verified model types"):
        split(clips(), 3, CONFIG, modalities={"videos"})

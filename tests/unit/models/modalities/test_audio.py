"""Tests that audio clips follow the samples that contain their placeholders."""

import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen2AudioConfig

from hf_megatron import ConfigError, UnsupportedError
from hf_megatron.models.modalities.images import without_pixels
from hf_megatron.models.modalities.sample_index import multimodal_samples
from hf_megatron.pipeline_parallel.microbatches import split

AUDIO, IMAGE = 9, 8
# Sample 0: a clip of two tokens. Sample 1: adjacent clips of three and two tokens. Sample 2: no clip.
INPUT_IDS = [
    [1, AUDIO, AUDIO, 2, 3, 4, 5],
    [1, AUDIO, AUDIO, AUDIO, AUDIO, AUDIO, 2],
    [1, 2, 3, 4, 5, 6, 7],
]
CONFIG = Qwen2AudioConfig(audio_token_index=AUDIO)


def make_batch():
    return {
        "input_ids": torch.tensor(INPUT_IDS),
        "input_features": torch.arange(24.0).view(3, 2, 4),
        "feature_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]]),
    }


def test_adjacent_clips_with_unequal_lengths():
    first, second, third = split(make_batch(), 3, CONFIG)
    assert first["input_features"].flatten().tolist() == list(range(8))
    assert second["input_features"].flatten().tolist() == list(range(8, 24))
    assert second["feature_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert third.keys() == {"input_ids"}


def test_two_samples_from_a_batch():
    samples = multimodal_samples(make_batch(), slice(1, 3), CONFIG)
    assert len(samples["input_features"]) == len(samples["feature_attention_mask"]) == 2


def test_audio_with_images():
    ids = torch.tensor(INPUT_IDS)
    ids[2, 3] = IMAGE
    config = CONFIG_MAPPING["gemma4"](audio_token_id=AUDIO, image_token_id=IMAGE)
    batch = make_batch() | {"input_ids": ids, "pixel_values": torch.ones(1, 3, 2, 2)}
    batch["input_features_mask"] = batch.pop("feature_attention_mask")
    first, second, third = split(batch, 3, config)
    assert len(first["input_features"]) == 1 and len(second["input_features_mask"]) == 2
    assert third.keys() == {"input_ids", "pixel_values"}


def test_later_stages_get_only_lengths():
    assert without_pixels(make_batch()).keys() == {"input_ids", "feature_attention_mask"}


def test_unmatched_audio_placeholders_are_rejected():
    batch = make_batch() | {"input_ids": torch.tensor([[1, AUDIO, AUDIO, AUDIO], [AUDIO, 1, 1, 1], [1, 1, 1, 1]])}
    with pytest.raises(ConfigError, match=r"4 audio clip placeholders, but its 3 audio clips"):
        split(batch, 3, CONFIG)


def test_unverified_audio_is_rejected():
    with pytest.raises(UnsupportedError, match=r"input_features: .*audio of verified model types"):
        split(make_batch(), 3, CONFIG, modalities={"videos"})

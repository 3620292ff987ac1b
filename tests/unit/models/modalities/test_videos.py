"""Tests that videos follow the samples that contain their placeholders."""

import pytest
import torch
from transformers import Glm4vConfig, LlavaNextVideoConfig, Qwen2VLConfig

from hf_megatron import ConfigError, UnsupportedError
from hf_megatron.models.modalities.images import without_pixels
from hf_megatron.models.modalities.sample_index import multimodal_samples
from hf_megatron.models.modalities.videos import rows_with_videos
from hf_megatron.pipeline_parallel.microbatches import split

IMAGE, VIDEO = 9, 8
# Sample 0: an image and a video. Sample 1: two videos, the second frame by frame. Sample 2: text only.
INPUT_IDS = [
    [1, IMAGE, 2, VIDEO, VIDEO, 3, 4, 5, 6],
    [VIDEO, VIDEO, 1, VIDEO, 2, VIDEO, 3, 4, 5],
    [1, 2, 3, 4, 5, 6, 7, 1, 2],
]
QWEN = Qwen2VLConfig(image_token_id=IMAGE, video_token_id=VIDEO)


def make_batch():
    return {
        "input_ids": torch.tensor(INPUT_IDS),
        "pixel_values": torch.arange(4.0).view(4, 1),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values_videos": torch.arange(24.0).view(24, 1),
        "video_grid_thw": torch.tensor([[2, 2, 2]] * 3),
        "second_per_grid_ts": torch.tensor([1.0, 2.0, 3.0]),
    }


def test_video_patches_with_images():
    first, second, third = split(make_batch(), 3, QWEN)
    assert first["pixel_values"].shape[0] == 4 and first["pixel_values_videos"].flatten().tolist() == list(range(8))
    assert "pixel_values" not in second
    assert second["pixel_values_videos"].flatten().tolist() == list(range(8, 24))
    assert second["second_per_grid_ts"].tolist() == [2, 3] and len(second["video_grid_thw"]) == 2
    assert third.keys() == {"input_ids"}


def test_full_frames():
    batch = {"input_ids": torch.tensor(INPUT_IDS), "pixel_values_videos": torch.arange(6.0).view(3, 2, 1, 1, 1)}
    config = LlavaNextVideoConfig(image_token_id=IMAGE, video_token_id=VIDEO)
    batches = [rows_with_videos(batch, slice(sample, sample + 1), config) for sample in range(3)]
    assert [videos["pixel_values_videos"].flatten().tolist() for videos in batches[:2]] == [[0, 1], [2, 3, 4, 5]]
    assert batches[2] == {}


def test_image_placeholders_are_used_for_videos():
    ids = torch.tensor(INPUT_IDS)
    batch = make_batch() | {"input_ids": ids.masked_fill(ids == IMAGE, 1).masked_fill(ids == VIDEO, IMAGE)}
    del batch["pixel_values"], batch["image_grid_thw"]
    first, second, third = split(batch, 3, Glm4vConfig(image_token_id=IMAGE, video_token_id=VIDEO))
    assert len(first["pixel_values_videos"]) == 8 and len(second["pixel_values_videos"]) == 16
    assert third.keys() == {"input_ids"}


def test_later_stages_get_no_pixels():
    assert without_pixels(make_batch()).keys() == make_batch().keys() - {"pixel_values", "pixel_values_videos"}


@pytest.mark.parametrize("ids", [[[VIDEO, VIDEO], [1, 2]], [[VIDEO, VIDEO, VIDEO], [VIDEO, VIDEO, VIDEO]]])
def test_unmatched_video_placeholders_are_rejected(ids):
    batch = make_batch() | {"input_ids": torch.tensor(ids), "pixel_values": None}
    with pytest.raises(ConfigError, match=r"video placeholders|one video span two samples"):
        multimodal_samples(batch, slice(0, 1), QWEN)


def test_unverified_videos_and_audio_are_rejected():
    with pytest.raises(UnsupportedError, match=r"pixel_values_videos.*audio of verified model types"):
        split(make_batch(), 3, QWEN, modalities={"audio"})
    with pytest.raises(UnsupportedError, match="num_frames_per_video"):
        split(make_batch() | {"num_frames_per_video": torch.tensor([2, 2, 2])}, 3, QWEN)
    with pytest.raises(UnsupportedError, match="input_features"):
        split(make_batch() | {"input_features": torch.zeros(3, 4)}, 3, QWEN)

"""Videos go with the rows in which their placeholders stand."""

import pytest
import torch
from transformers import Glm4vConfig, LlavaNextVideoConfig, Qwen2VLConfig

from hf_megatron import ConfigError, UnsupportedError
from hf_megatron.models.modalities.images import without_pixels
from hf_megatron.models.modalities.sample_index import multimodal_samples
from hf_megatron.models.modalities.videos import rows_with_videos
from hf_megatron.pipeline_parallel.microbatches import split

IMAGE, VIDEO = 9, 8
# An image and a video, then two videos, the second one frame by frame, then none.
ROWS = [
    [1, IMAGE, 2, VIDEO, VIDEO, 3, 4, 5, 6],
    [VIDEO, VIDEO, 1, VIDEO, 2, VIDEO, 3, 4, 5],
    [1, 2, 3, 4, 5, 6, 7, 1, 2],
]
QWEN = Qwen2VLConfig(image_token_id=IMAGE, video_token_id=VIDEO)


def patches():
    return {
        "input_ids": torch.tensor(ROWS),
        "pixel_values": torch.arange(4.0).view(4, 1),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "pixel_values_videos": torch.arange(24.0).view(24, 1),
        "video_grid_thw": torch.tensor([[2, 2, 2]] * 3),
        "second_per_grid_ts": torch.tensor([1.0, 2.0, 3.0]),
    }


def test_patches_of_videos_with_images():
    first, second, third = split(patches(), 3, QWEN)
    assert first["pixel_values"].shape[0] == 4 and first["pixel_values_videos"].flatten().tolist() == list(range(8))
    assert "pixel_values" not in second
    assert second["pixel_values_videos"].flatten().tolist() == list(range(8, 24))
    assert second["second_per_grid_ts"].tolist() == [2, 3] and len(second["video_grid_thw"]) == 2
    assert third.keys() == {"input_ids"}


def test_full_frames():
    batch = {"input_ids": torch.tensor(ROWS), "pixel_values_videos": torch.arange(6.0).view(3, 2, 1, 1, 1)}
    config = LlavaNextVideoConfig(image_token_id=IMAGE, video_token_id=VIDEO)
    found = [rows_with_videos(batch, slice(row, row + 1), config) for row in range(3)]
    assert [videos["pixel_values_videos"].flatten().tolist() for videos in found[:2]] == [[0, 1], [2, 3, 4, 5]]
    assert found[2] == {}


def test_placeholders_of_images_stand_for_videos_where_there_are_no_others():
    ids = torch.tensor(ROWS)
    batch = patches() | {"input_ids": ids.masked_fill(ids == IMAGE, 1).masked_fill(ids == VIDEO, IMAGE)}
    del batch["pixel_values"], batch["image_grid_thw"]
    first, second, third = split(batch, 3, Glm4vConfig(image_token_id=IMAGE, video_token_id=VIDEO))
    assert len(first["pixel_values_videos"]) == 8 and len(second["pixel_values_videos"]) == 16
    assert third.keys() == {"input_ids"}


def test_later_stages_are_given_no_pixels():
    assert without_pixels(patches()).keys() == patches().keys() - {"pixel_values", "pixel_values_videos"}


@pytest.mark.parametrize("ids", [[[VIDEO, VIDEO], [1, 2]], [[VIDEO, VIDEO, VIDEO], [VIDEO, VIDEO, VIDEO]]])
def test_placeholders_that_fit_no_video_are_refused(ids):
    batch = patches() | {"input_ids": torch.tensor(ids), "pixel_values": None}
    with pytest.raises(ConfigError, match=r"video placeholders|one video span two samples"):
        multimodal_samples(batch, slice(0, 1), QWEN)


def test_videos_that_were_not_compared_and_audio_of_models_without_are_refused():
    with pytest.raises(UnsupportedError, match=r"pixel_values_videos.*audio of verified model types"):
        split(patches(), 3, QWEN, modalities={"audio"})
    with pytest.raises(UnsupportedError, match="num_frames_per_video"):
        split(patches() | {"num_frames_per_video": torch.tensor([2, 2, 2])}, 3, QWEN)
    with pytest.raises(UnsupportedError, match="input_features"):
        split(patches() | {"input_features": torch.zeros(3, 4)}, 3, QWEN)

"""Images go with the rows in which their placeholders stand."""

import pytest
import torch
from transformers import InternVLConfig, Qwen2VLConfig

from hf_megatron import ConfigError
from hf_megatron.media import rows_with_images
from hf_megatron.pipeline_parallel.microbatches import split

IMAGE = 9
ROWS = [[1, IMAGE, IMAGE, 2, 3, 4, 5], [IMAGE, IMAGE, 1, IMAGE, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6, 7]]


def whole_images():
    return {"input_ids": torch.tensor(ROWS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}


def patches():
    ids = torch.tensor([[1, IMAGE, 2, 3, 4, 5], [IMAGE, IMAGE, 1, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
    return {"input_ids": ids, "pixel_values": torch.arange(16.0).view(16, 1), "image_grid_thw": grid}


def test_whole_images():
    config = InternVLConfig(image_token_id=IMAGE)
    found = [rows_with_images(whole_images(), slice(row, row + 1), config) for row in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in found[:2]] == [[0], [1, 2]] and found[2] == {}
    assert rows_with_images(whole_images(), slice(0, 3), config)["pixel_values"].shape[0] == 3


def test_patches_of_images_of_several_sizes():
    config = Qwen2VLConfig(image_token_id=IMAGE)
    batch = patches()
    found = [rows_with_images(batch, slice(row, row + 1), config) for row in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in found[:2]] == [[0, 1, 2, 3], list(range(4, 16))]
    assert found[1]["image_grid_thw"].tolist() == batch["image_grid_thw"][1:].tolist() and found[2] == {}


def test_microbatches_have_the_images_of_their_rows():
    first, second, third = split(patches(), 3, Qwen2VLConfig(image_token_id=IMAGE))
    assert first["pixel_values"].shape[0] == 4 and second["pixel_values"].shape[0] == 12
    assert third.keys() == {"input_ids"}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[IMAGE, 1], [IMAGE, 1]], "2 placeholders of images in input_ids for 3 images"),
        ([[IMAGE, IMAGE, IMAGE], [IMAGE, IMAGE, IMAGE]], "stand in two rows"),
    ],
)
def test_images_that_belong_to_no_row_are_refused(ids, message):
    batch = {"input_ids": torch.tensor(ids), "pixel_values": torch.zeros(3, 1, 1, 1)}
    with pytest.raises(ConfigError, match=message):
        rows_with_images(batch, slice(0, 1), InternVLConfig(image_token_id=IMAGE))

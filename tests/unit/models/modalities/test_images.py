"""Images go with the rows in which their placeholders stand."""

import pytest
import torch
from transformers import GitConfig, InstructBlipVideoConfig, InternVLConfig, Kosmos2Config, Molmo2Config, Qwen2VLConfig

from hf_megatron import ConfigError, UnsupportedError
from hf_megatron.models.modalities.images import rows_with_images, without_pixels
from hf_megatron.pipeline_parallel.microbatches import split

IMAGE = 9
ROWS = [[1, IMAGE, IMAGE, 2, 3, 4, 5], [IMAGE, IMAGE, 1, IMAGE, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6, 7]]


def full_images():
    return {"input_ids": torch.tensor(ROWS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}


def patches():
    ids = torch.tensor([[1, IMAGE, 2, 3, 4, 5], [IMAGE, IMAGE, 1, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]])
    return {"input_ids": ids, "pixel_values": torch.arange(16.0).view(16, 1), "image_grid_thw": grid}


def test_full_images():
    config = InternVLConfig(image_token_id=IMAGE)
    found = [rows_with_images(full_images(), slice(row, row + 1), config) for row in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in found[:2]] == [[0], [1, 2]] and found[2] == {}
    assert rows_with_images(full_images(), slice(0, 3), config)["pixel_values"].shape[0] == 3


def test_tiles_of_rows_stay_with_rows_without_images():
    batch = {"input_ids": torch.tensor(ROWS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1, 1, 1)}
    found = [rows_with_images(batch, slice(row, row + 1), InternVLConfig(image_token_id=IMAGE)) for row in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in found] == [[0], [1], [2]]


def test_patches_of_images_of_several_sizes():
    config = Qwen2VLConfig(image_token_id=IMAGE)
    batch = patches()
    found = [rows_with_images(batch, slice(row, row + 1), config) for row in range(3)]
    assert [images["pixel_values"].flatten().tolist() for images in found[:2]] == [[0, 1, 2, 3], list(range(4, 16))]
    assert found[1]["image_grid_thw"].tolist() == batch["image_grid_thw"][1:].tolist() and found[2] == {}


def test_patches_that_are_pooled_are_counted_among_those_of_the_rows_images():
    # Four patches a crop; image, then two, the first of them of two crops.
    pooled = torch.tensor([[0, 1], [2, -1], [4, 5], [8, 11], [12, -1]])
    batch = {
        "input_ids": torch.tensor([[1, IMAGE, 2, IMAGE], [IMAGE, IMAGE, 1, IMAGE], [1, 2, 3, 4]]),
        "pixel_values": torch.arange(16.0).view(4, 4, 1),
        "image_token_pooling": pooled,
        "image_grids": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]),
        "image_num_crops": torch.tensor([1, 2, 1]),
    }
    first, second, third = split(batch, 3, Molmo2Config(image_patch_id=IMAGE))
    assert first["pixel_values"].flatten().tolist() == [0, 1, 2, 3] and third.keys() == {"input_ids"}
    assert torch.equal(first["image_token_pooling"], pooled[:2]) and first["image_num_crops"].tolist() == [1]
    assert second["image_token_pooling"].tolist() == [[0, 1], [4, 7], [8, -1]]
    flat = batch["pixel_values"].flatten()
    assert torch.equal(second["pixel_values"].flatten()[[0, 1, 4, 7, 8]], flat[[4, 5, 8, 11, 12]])


def test_microbatches_have_the_images_of_their_rows():
    first, second, third = split(patches(), 3, Qwen2VLConfig(image_token_id=IMAGE))
    assert first["pixel_values"].shape[0] == 4 and second["pixel_values"].shape[0] == 12
    assert third.keys() == {"input_ids"}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[IMAGE, 1], [IMAGE, 1]], "2 image placeholders, but its 3 images"),
        ([[IMAGE, IMAGE, IMAGE], [IMAGE, IMAGE, IMAGE]], "span two samples"),
    ],
)
def test_images_that_belong_to_no_row_are_refused(ids, message):
    batch = {"input_ids": torch.tensor(ids), "pixel_values": torch.zeros(3, 1, 1, 1)}
    with pytest.raises(ConfigError, match=message):
        rows_with_images(batch, slice(0, 1), InternVLConfig(image_token_id=IMAGE))


def cut(batch, config=None):
    config = config or InternVLConfig(image_token_id=IMAGE)
    return [rows_with_images(batch, slice(row, row + 1), config) for row in range(len(batch["input_ids"]))]


UNEVEN = [[1, IMAGE, 2, 3, 4, 5, 6], [IMAGE, IMAGE, IMAGE, 1, IMAGE, 2, 3], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("image_sizes", [[30, 30], [60, 31], [30, 30]]),
        ("spatial_shapes", [[1, 2], [3, 2], [1, 2]]),
        ("image_position_ids", [[[0, 0], [-1, -1]], [[0, 0], [1, 0]], [[0, 0], [-1, -1]]]),
    ],
)
def test_images_of_several_sizes_have_placeholders_side_by_side(name, sizes):
    pixels = torch.arange(3.0).view(3, 1, 1, 1, 1)
    masks = torch.arange(3).view(3, 1)
    batch = {"input_ids": torch.tensor(UNEVEN), "pixel_values": pixels, name: torch.tensor(sizes)}
    first, second, third = cut(batch | {"pixel_attention_mask": masks})
    assert first["pixel_values"].flatten().tolist() == [0] and second["pixel_values"].flatten().tolist() == [1, 2]
    assert second["pixel_attention_mask"].flatten().tolist() == [1, 2] and second[name].tolist() == sizes[1:]
    assert third == {}


def test_images_of_one_size_with_unlike_placeholders_are_refused():
    batch = {"input_ids": torch.tensor(UNEVEN), "pixel_values": torch.zeros(3, 1, 1, 1)}
    with pytest.raises(ConfigError, match="5 image placeholders, but its 3 images"):
        cut(batch | {"image_sizes": torch.tensor([[30, 30]] * 3)})


def test_images_without_placeholders_are_refused():
    batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "pixel_values": torch.zeros(2, 1, 1, 1)}
    with pytest.raises(ConfigError, match="0 image placeholders, but its 2 images"):
        cut(batch)


def test_images_of_rows_stay_with_them():
    """As many columns of images as the fullest row has, the others being empty."""
    pixels = torch.arange(6.0).view(3, 2, 1, 1, 1)
    masks = torch.arange(6).view(3, 2)
    batch = {"input_ids": torch.tensor(ROWS), "pixel_values": pixels, "pixel_attention_mask": masks}
    first, second, third = cut(batch)
    assert first["pixel_values"].shape == (1, 2, 1, 1, 1) and third == {}
    assert second["pixel_values"].flatten().tolist() == second["pixel_attention_mask"].flatten().tolist() == [2, 3]
    with pytest.raises(ConfigError, match="pixel_attention_mask has 2 entries for 3"):
        cut(batch | {"pixel_attention_mask": masks[:2]})


def test_patches_side_by_side():
    sizes = torch.tensor([[2, 2], [2, 6], [2, 2]])
    pixels = torch.arange(20.0).repeat_interleave(7).view(1, 1, 1, 140)
    batch = {"input_ids": torch.tensor(UNEVEN), "pixel_values": pixels, "target_sizes": sizes}
    first, second, third = cut(batch)
    assert first["pixel_values"].shape == (1, 1, 1, 28) and second["pixel_values"].shape == (1, 1, 1, 112)
    assert second["pixel_values"].unique().tolist() == list(range(4, 20)) and third == {}
    with pytest.raises(ConfigError, match="for 3 images of 20 patches"):
        cut(batch | {"pixel_values": pixels[..., 1:]})


def test_numbers_of_images_are_of_rows():
    batch = {"input_ids": torch.tensor(UNEVEN), "pixel_values": torch.zeros(3, 2, 1, 1, 1)}
    batch |= {"image_sizes": torch.tensor([[30, 30]] * 3), "batch_num_images": torch.tensor([1, 2, 0])}
    first, second, third = cut(batch)
    assert [part["batch_num_images"].tolist() for part in (first, second)] == [[1], [2]] and third == {}


def test_views_of_parts_go_with_their_images():
    batch = {"input_ids": torch.tensor(UNEVEN), "pixel_values": torch.zeros(3, 1, 1, 1)}
    batch |= {"pixel_values_local": torch.arange(4.0).view(4, 1), "num_local_patches": [0, 4, 0]}
    first, second, _ = cut(batch)
    assert "pixel_values_local" not in first and first["num_local_patches"] == [0]
    assert second["pixel_values_local"].flatten().tolist() == [0, 1, 2, 3] and second["num_local_patches"] == [4, 0]


def test_stages_without_a_tower_are_given_places_alone():
    batch = {name: torch.zeros(1) for name in ("input_ids", "image_grid_thw", "target_sizes", "mm_token_type_ids")}
    image_inputs = ("pixel_values", "pixel_attention_mask", "high_res_pixel_values", "pixel_values_local")
    assert without_pixels(batch | {name: torch.zeros(1) for name in image_inputs}).keys() == batch.keys()


@pytest.mark.parametrize("name", ["pixel_values_videos", "video_grid_thw", "input_features", "image_pixel_values"])
def test_videos_and_audio_are_refused_by_pipelines(name):
    """With an entry for each row, too: nothing says that it is that row's."""
    with pytest.raises(UnsupportedError, match=f"{name}: a pipeline cannot split it"):
        split({"input_ids": torch.ones(4, 6, dtype=torch.long), name: torch.ones(4, 3)}, 2)


def test_positions_are_found_by_a_mask():
    places = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    batch = {"input_ids": torch.ones(3, 4, dtype=torch.long), "image_embeds_position_mask": places}
    batch |= {"pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}
    first, second, third = split(batch, 3, Kosmos2Config())
    assert first["pixel_values"].flatten().tolist() == [0] and third["pixel_values"].flatten().tolist() == [1, 2]
    assert second.keys() == {"input_ids", "image_embeds_position_mask"}


def test_questions_go_with_their_videos():
    config = InstructBlipVideoConfig(video_token_index=IMAGE)
    pixels, questions = torch.arange(6.0).view(3, 2, 1, 1, 1), torch.arange(3).view(3, 1)
    batch = {"input_ids": torch.tensor(ROWS), "pixel_values": pixels, "qformer_input_ids": questions}
    first, second, third = cut(batch, config)
    assert first["qformer_input_ids"].tolist() == [[0]] and second["qformer_input_ids"].tolist() == [[1], [2]]
    assert second["pixel_values"].flatten().tolist() == [2, 3, 4, 5] and third == {}
    assert "qformer_input_ids" in without_pixels(batch)


def test_images_of_rows_without_places():
    batch = {"input_ids": torch.tensor(ROWS), "pixel_values": torch.arange(3.0).view(3, 1, 1, 1)}
    assert [images["pixel_values"].item() for images in cut(batch, GitConfig())] == [0, 1, 2]

"""Tests of slicing a rank's local samples, with their images, from the global batch."""

import pytest
import torch

from hf_megatron.integrations.trainer.global_batches import _has_rows, _OwnRows

IMAGES = [1, 0, 2, 1]


def collate(rows):
    """Pads text and stacks all images of a batch, as collators of vision-language recipes do."""
    width = max(rows) + 1
    batch = {"input_ids": torch.tensor([[sample] * (sample + 1) + [9] * (width - sample - 1) for sample in rows])}
    images = [sample * 10 + image for sample in rows for image in range(IMAGES[sample])]
    return batch | ({"pixel_values": torch.tensor(images)} if images else {})


@pytest.mark.parametrize(("rank", "images"), [(0, [0]), (1, [20, 21, 30])])
def test_samples_keep_their_images(rank, images):
    batch = _OwnRows(collate, rank, 2)(range(4))
    assert batch["pixel_values"].tolist() == images
    # Padded to the longest sample of all ranks.
    assert batch["input_ids"].shape == (2, 4) and batch["input_ids"][:, 0].tolist() == [2 * rank, 2 * rank + 1]


def test_samples_without_images_get_none():
    assert set(_OwnRows(collate, 1, 1)(range(2))) == {"input_ids"}


def test_repeated_samples_keep_their_images():
    batch = _OwnRows(collate, 1, 2)([2, 3, 0])
    assert batch["input_ids"][:, 0].tolist() == [0, 2] and batch["pixel_values"].tolist() == [0, 20, 21]


def test_image_count_does_not_set_batch_size():
    assert _has_rows(collate(range(4)), 4) and _has_rows(collate([2, 3]), 2)
    assert not _has_rows({"input_ids": torch.zeros(1, 7), "pixel_values": torch.zeros(4)}, 4)


def test_images_without_text_are_samples():
    """A collator that mixes images and labels (mixup) is called once, on the global batch."""
    calls = []

    def mix(rows):
        calls.append(rows)
        return {"pixel_values": torch.tensor(rows) + len(calls), "labels": torch.tensor(rows) + len(calls)}

    batch = _OwnRows(mix, 1, 2)([0, 1, 2, 3])
    assert batch["pixel_values"].tolist() == batch["labels"].tolist() == [3, 4] and len(calls) == 1

"""Ordered datasets as tables of `datasets`, for TRL's trainers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import DataError
from .ordered_dataset import OrderedDataset

_IGNORED = -100


class TableSamples:
    """Table transform that replaces sample indices with samples whose labels the model shifts itself.

    A row has `input_ids` and `labels` `[sequence_length + 1]`; the first label is ignored, since nothing predicts it.
    """

    def __init__(self, dataset: OrderedDataset):
        self.dataset = dataset

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        rows = [self._row(number) for number in batch["input_ids"]]
        return {name: [row[name] for row in rows] for name in ("input_ids", "labels")}

    def _row(self, number: int) -> dict[str, Any]:
        sample = self.dataset[number]
        labels = sample["labels"]
        ignored = labels.new_full((1,), _IGNORED)
        # Append the last label as a token. If it is ignored, any token id will do.
        tokens = torch.cat([sample["input_ids"], labels[-1:].clamp(min=0)])
        return {"input_ids": tokens.tolist(), "labels": torch.cat([ignored, labels]).tolist()}

    def __deepcopy__(self, memo: Any) -> "TableSamples":
        # `datasets` deep-copies the transform whenever it removes a column.
        return self


def build_table(dataset: OrderedDataset) -> Any:
    """Returns an ordered dataset as a `datasets.Dataset` of sample indices, which reads the samples on access.

    Trainer keeps the order and resumes as with the dataset itself.

        arguments = SFTConfig(..., dataset_kwargs={"skip_prepare_dataset": True})
        SFTTrainer(model, arguments, train_dataset=build_table(dataset))

    Args:
        dataset: with next-token labels, and without `position_ids`, which TRL would drop.

    Raises:
        DataError: a dataset of another kind.
    """
    import datasets

    if not isinstance(dataset, OrderedDataset) or not dataset.is_shifted:
        raise DataError(f"{type(dataset).__name__}: expected a dataset with next-token labels.")
    if "position_ids" in dataset[0]:
        raise DataError("restart is not supported: TRL drops position_ids, so the model would attend across documents.")
    index_table = datasets.Dataset.from_dict({"input_ids": range(len(dataset))})
    return index_table.with_transform(TableSamples(dataset))

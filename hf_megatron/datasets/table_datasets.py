"""Datasets with an order of their own as tables of `datasets`, which TRL's trainers take."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import DataError
from .ordered_dataset import OrderedDataset

_IGNORED = -100


class TableSamples:
    """What a table's rows are when they are asked for: those of a dataset, with labels that a model shifts itself.

    A row has `input_ids` and `labels` `[sequence_length + 1]`, without the first label: nothing predicts it.
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
        # A token that nothing follows, and whose label is ignored, may be any.
        tokens = torch.cat([sample["input_ids"], labels[-1:].clamp(min=0)])
        return {"input_ids": tokens.tolist(), "labels": torch.cat([ignored, labels]).tolist()}

    def __deepcopy__(self, memo: Any) -> "TableSamples":
        # Tables are copied whenever a column is left out.
        return self


def table_of(dataset: OrderedDataset) -> Any:
    """Returns a dataset's samples as a `datasets.Dataset`, which holds their numbers and reads them when they are used.

    Trainer keeps their order and goes on with the next, as of the dataset itself.

        arguments = SFTConfig(..., dataset_kwargs={"skip_prepare_dataset": True})
        SFTTrainer(model, arguments, train_dataset=table_of(dataset))

    Args:
        dataset: with labels of the next tokens, and without `position_ids`, which TRL would leave out.

    Raises:
        DataError: a dataset of another kind.
    """
    import datasets

    if not isinstance(dataset, OrderedDataset) or not dataset.is_shifted:
        raise DataError(f"{type(dataset).__name__}: expected a dataset with labels of the next tokens.")
    if "position_ids" in dataset[0]:
        raise DataError("restart: TRL leaves positions out, and models would attend over documents.")
    numbers = datasets.Dataset.from_dict({"input_ids": range(len(dataset))})
    return numbers.with_transform(TableSamples(dataset))

"""Which data have an order of their own, behind what may be around them."""

import sys
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from ..errors import DataError
from .ordered_dataset import OrderedDataset
from .table_datasets import TableSamples

# Rows of a table whose numbers are looked at.
_COMPARED = 64


def ordered_of(dataset: Any) -> OrderedDataset | None:
    """Returns the dataset itself, or the one whose rows a table has; `None` of others."""
    if isinstance(dataset, OrderedDataset):
        return dataset
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset):
        return None
    rows = dataset.format["format_kwargs"].get("transform")
    return rows.dataset if isinstance(rows, TableSamples) else None


def require_full(table: Any) -> None:
    """Checks that the rows of a table are all of its dataset's, in their order.

    Raises:
        DataError: some were moved, or left out.
    """
    dataset = ordered_of(table)
    if dataset is None or table is dataset:
        return
    numbers, size = table.with_format(None), len(dataset)
    places = range(0, size, max(1, size // _COMPARED))
    if len(table) != size or any(numbers[place]["input_ids"] != place for place in places):
        raise DataError(
            f"a table of {len(table)} rows, of the {size} of {type(dataset).__name__}: they were moved or left out. "
            "WithoutSamples leaves some out, and table_of is given that."
        )


def has_own_order(dataset: Any) -> bool:
    """Tells whether a dataset is one with an order of its own, or a part or a chain of such."""
    if isinstance(dataset, Subset):
        return has_own_order(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(has_own_order, dataset.datasets))
    return ordered_of(dataset) is not None


def is_shifted(dataset: Any) -> bool:
    """Tells whether a dataset with an order of its own, or a part or a chain of such, has labels of the next tokens."""
    if isinstance(dataset, Subset):
        return is_shifted(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(is_shifted, dataset.datasets))
    return isinstance(dataset, OrderedDataset) and dataset.is_shifted

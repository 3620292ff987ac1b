"""Detection of ordered datasets inside subsets, concatenations, and tables."""

import sys
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from ..errors import DataError
from .ordered_dataset import OrderedDataset
from .table_datasets import TableSamples

# Number of table rows whose sample indices are checked.
_COMPARED = 64


def get_ordered_dataset(dataset: Any) -> OrderedDataset | None:
    """Returns the ordered dataset itself, or the one that a table reads; `None` for other datasets."""
    if isinstance(dataset, OrderedDataset):
        return dataset
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset):
        return None
    rows = dataset.format["format_kwargs"].get("transform")
    return rows.dataset if isinstance(rows, TableSamples) else None


def require_full(table: Any) -> None:
    """Checks that a table has all samples of its ordered dataset, in order.

    Raises:
        DataError: samples were moved or left out.
    """
    dataset = get_ordered_dataset(table)
    if dataset is None or table is dataset:
        return
    indices, size = table.with_format(None), len(dataset)
    places = range(0, size, max(1, size // _COMPARED))
    if len(table) != size or any(indices[place]["input_ids"] != place for place in places):
        raise DataError(
            f"Got a table of {len(table)} samples for the {size} samples of {type(dataset).__name__}: samples were "
            "moved or removed. To leave samples out, pass a WithoutSamples to build_table."
        )


def has_own_order(dataset: Any) -> bool:
    """Returns whether a dataset is ordered, or is a subset or concatenation of ordered datasets."""
    if isinstance(dataset, Subset):
        return has_own_order(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(has_own_order, dataset.datasets))
    return get_ordered_dataset(dataset) is not None


def is_shifted(dataset: Any) -> bool:
    """Returns whether an ordered dataset, or a subset or concatenation of such, has next-token labels."""
    if isinstance(dataset, Subset):
        return is_shifted(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(is_shifted, dataset.datasets))
    return isinstance(dataset, OrderedDataset) and dataset.is_shifted

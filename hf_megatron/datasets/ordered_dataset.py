"""Ordered datasets, whose sample order is fixed, and exclusion of some of their samples."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ..compat.patch_registry import PATCH_REGISTRY
from ..errors import DataError
from .ramp_up import BatchRampUp


class OrderedDataset(Dataset):
    """A dataset in a fixed order: sample 0 comes first, and samples are not shuffled again.

    Attributes:
        order_key (`dict`): all inputs of the order; datasets with equal keys have the same samples in the same order.
        seen (`int`, defaults to 0): samples used by an earlier run, for example of Megatron-LM; Trainer begins after
            them.
        is_shifted (`bool`): whether labels are next-token labels, which transformers models otherwise shift themselves.
        ramp_up (`BatchRampUp`, *optional*): numbers of samples that Trainer takes for each step; constant by default.
    """

    order_key: dict[str, Any]
    seen: int = 0
    is_shifted: bool = True
    ramp_up: BatchRampUp | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Activate the patches: a stock Trainer would shuffle the samples, even with a model that is not parallelized.
        PATCH_REGISTRY.activate()
        return super().__new__(cls)

    def get_full_index(self, sample: int) -> int:
        """Returns the index of a sample when none are left out."""
        return sample

    def sample_at(self, place: int) -> int:
        """Returns the first sample at or after an index that counts left-out samples."""
        return place

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        raise NotImplementedError


class WithoutSamples(OrderedDataset):
    """A dataset without some of its samples, such as the batch that spoiled a run.

    A run may be resumed with other ranges, as long as these are ahead of its position.

        WithoutSamples(dataset, [(51_200, 51_712)])

    Args:
        dataset: an ordered dataset.
        ranges: `[first, stop)` ranges of samples, sorted and disjoint.

    Raises:
        DataError: ranges that are empty, out of order, or not in the dataset.
    """

    def __init__(self, dataset: OrderedDataset, ranges: Sequence[tuple[int, int]]):
        self.dataset, self.ranges = dataset, [(int(first), int(stop)) for first, stop in ranges]
        ends = [0, *(end for pair in self.ranges for end in pair), len(dataset)]
        if ends != sorted(ends) or any(first == stop for first, stop in self.ranges):
            raise DataError(f"ranges {self.ranges} of {len(dataset)} samples: expected [first, stop) in their order.")
        self.order_key, self.is_shifted = dataset.order_key, dataset.is_shifted

    @property
    def seen(self) -> int:  # type: ignore[override]
        """Samples used by an earlier run, counted in the dataset with all samples."""
        return self.dataset.seen

    @seen.setter
    def seen(self, samples: int) -> None:
        self.dataset.seen = samples

    @property
    def ramp_up(self) -> BatchRampUp | None:  # type: ignore[override]
        """Number of samples of each step."""
        return self.dataset.ramp_up

    @ramp_up.setter
    def ramp_up(self, sizes: BatchRampUp | None) -> None:
        self.dataset.ramp_up = sizes

    def __len__(self) -> int:
        return len(self.dataset) - sum(stop - first for first, stop in self.ranges)

    def get_full_index(self, sample: int) -> int:
        for first, stop in self.ranges:
            if sample >= first:
                sample += stop - first
        return self.dataset.get_full_index(sample)

    def sample_at(self, place: int) -> int:
        place = self.dataset.sample_at(place)
        return place - sum(min(place, stop) - first for first, stop in self.ranges if place > first)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        for first, stop in self.ranges:
            if sample >= first:
                sample += stop - first
        return self.dataset[sample]

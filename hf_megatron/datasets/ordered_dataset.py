"""Datasets whose order is their own, and what is left out of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from ..compat.patch_registry import PATCH_REGISTRY
from ..errors import DataError
from .ramp_up import BatchRampUp


class OrderedDataset(Dataset):
    """A dataset whose order is its own: sample 0 comes first, and nobody shuffles it again.

    Attributes:
        order_key (`dict`): what the order is made of; two datasets with the same one have the same samples in the same
            order.
        seen (`int`, defaults to 0): samples that an earlier run had, as of Megatron-LM: Trainer begins with the next.
        is_shifted (`bool`): whether labels are those of the next tokens, which models of transformers shift otherwise.
        ramp_up (`BatchRampUp`, *optional*): how many samples Trainer takes for a step; always as many by default.
    """

    order_key: dict[str, Any]
    seen: int = 0
    is_shifted: bool = True
    ramp_up: BatchRampUp | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A plain Trainer would shuffle the samples, also for a model that is not parallelized.
        PATCH_REGISTRY.activate()
        return super().__new__(cls)

    def place_of(self, sample: int) -> int:
        """Returns where a sample is when none is left out."""
        return sample

    def sample_at(self, place: int) -> int:
        """Returns the first sample from a place on, where none is left out."""
        return place

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        raise NotImplementedError


class WithoutSamples(OrderedDataset):
    """A dataset of which some samples are left out, as those of a batch that spoilt a run.

    A run goes on with other ranges than it had, as long as they lie ahead.

        WithoutSamples(dataset, [(51_200, 51_712)])

    Args:
        dataset: in an order of its own.
        ranges: `[first, stop)` of its samples; apart from each other and in their order.

    Raises:
        DataError: ranges that are empty, not in order, or not in the dataset.
    """

    def __init__(self, dataset: OrderedDataset, ranges: Sequence[tuple[int, int]]):
        self.dataset, self.ranges = dataset, [(int(first), int(stop)) for first, stop in ranges]
        ends = [0, *(end for pair in self.ranges for end in pair), len(dataset)]
        if ends != sorted(ends) or any(first == stop for first, stop in self.ranges):
            raise DataError(f"ranges {self.ranges} of {len(dataset)} samples: expected [first, stop) in their order.")
        self.order_key, self.is_shifted = dataset.order_key, dataset.is_shifted

    @property
    def seen(self) -> int:  # type: ignore[override]
        """Samples that an earlier run had, of the dataset with all of them."""
        return self.dataset.seen

    @seen.setter
    def seen(self, samples: int) -> None:
        self.dataset.seen = samples

    @property
    def ramp_up(self) -> BatchRampUp | None:  # type: ignore[override]
        """How many samples a step has."""
        return self.dataset.ramp_up

    @ramp_up.setter
    def ramp_up(self, sizes: BatchRampUp | None) -> None:
        self.dataset.ramp_up = sizes

    def __len__(self) -> int:
        return len(self.dataset) - sum(stop - first for first, stop in self.ranges)

    def place_of(self, sample: int) -> int:
        for first, stop in self.ranges:
            if sample >= first:
                sample += stop - first
        return self.dataset.place_of(sample)

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

"""Blend of several datasets, interleaved by weight."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import DataError
from .index_cache import cached_arrays
from .megatron_cache import megatron_blend
from .ordered_dataset import OrderedDataset, WithoutSamples
from .pretraining import PretrainingDataset
from .sample_index import BlendOrder, blend_order, count_blend_samples, exhaustive_order


class BlendedDataset(OrderedDataset):
    """Blend of several datasets, interleaved as in Megatron-Core's `BlendedDataset`.

    Args:
        datasets: of one kind; each keeps its own order.
        weights (*optional*): relative sampling rates; by default proportional to the sizes.
        samples (`int`, *optional*): of the blend; by default every dataset is used up, without weights.
        cache (`str` or `Path`, *optional*): as in `PretrainingDataset`.

    Raises:
        DataError: numbers of weights and datasets differ, a weight is not above 0, a dataset has fewer samples than the
            blend takes, or the datasets cannot be blended.
    """

    def __init__(
        self,
        datasets: Sequence[OrderedDataset],
        weights: Sequence[float] | None = None,
        samples: int | None = None,
        *,
        cache: str | os.PathLike[str] | None = None,
    ):
        self.datasets = list(datasets)
        sizes = [len(dataset) for dataset in self.datasets]
        if not sizes or (weights is not None and len(weights) != len(sizes)):
            raise DataError(
                f"BlendedDataset got {len(sizes)} datasets and {len(weights or ())} weights: expected at least one "
                "dataset, and one weight for each."
            )
        if any(isinstance(one, WithoutSamples) or one.seen or one.ramp_up for one in self.datasets):
            raise DataError(
                "A blend cannot contain datasets with left-out or seen samples, or with a batch-size ramp-up. Blend "
                "the plain datasets and apply WithoutSamples(BlendedDataset(...), ...), or set seen or ramp_up of the "
                "blend."
            )
        if len({one.is_shifted for one in self.datasets}) > 1:
            raise DataError("A blend cannot mix datasets with and without next-token labels.")
        self.is_shifted = self.datasets[0].is_shifted
        if weights is not None and (samples is None or min(weights) <= 0):
            raise DataError(
                f"weights = {list(weights)}, samples = {samples}: expected weights above 0, and a number of samples."
            )
        if samples is not None and samples < 1:
            raise DataError(f"samples = {samples}: expected 1 or more.")
        if weights is not None and samples is not None:
            samples = sum(count_blend_samples(weights, samples)[0])
        elif samples is not None:
            samples = min(samples, sum(sizes))
        self.order_key = {
            "kind": "blend",
            "datasets": [dataset.order_key for dataset in self.datasets],
            "weights": sizes if weights is None else [float(weight) for weight in weights],
            # A longer blend begins with the samples of a shorter one, so the length is not part of the key.
            "to the end": samples is None,
        }

        # Megatron normalizes given weights here and again in the blend, which rounds differently from doing it once.
        shares: Sequence[float] = sizes if weights is None else (weights / np.sum(weights)).tolist()

        def make() -> Mapping[str, np.ndarray]:
            order = self._kept(cache, shares, samples)
            if order is None:
                order = exhaustive_order(sizes) if samples is None else blend_order(shares, samples)
            return _with_taken(order, len(sizes))

        key = {"of": "blend", "weights": self.order_key["weights"], "samples": samples}
        arrays = cached_arrays(key, None if cache is None else Path(cache), make)
        self.order = BlendOrder(arrays["dataset"], arrays["sample"])
        for number, (size, taken) in enumerate(zip(sizes, arrays["taken"].tolist(), strict=True)):
            if taken > size:
                raise DataError(f"dataset {number} of the blend has {size} samples, but {taken} are needed.")

    def _kept(
        self, cache: str | os.PathLike[str] | None, shares: Sequence[float], samples: int | None
    ) -> BlendOrder | None:
        """Returns the order of the same blend from Megatron-LM's cache, if there is one."""
        described = [one.described() for one in self.datasets if isinstance(one, PretrainingDataset)]
        if cache is None or len(described) != len(self.datasets):
            return None
        return megatron_blend(Path(cache), described, shares, samples)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return self.datasets[int(self.order.dataset[sample])][int(self.order.sample[sample])]


def _with_taken(order: BlendOrder, datasets: int) -> Mapping[str, np.ndarray]:
    taken = np.bincount(order.dataset, minlength=datasets)
    return {"dataset": order.dataset, "sample": order.sample, "taken": taken}

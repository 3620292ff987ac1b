"""Sample streams without random access, which can be read in order from any position."""

import hashlib
import itertools
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..compat.patch_registry import PATCH_REGISTRY
from ..errors import DataError
from .ordered_dataset import OrderedDataset
from .ramp_up import BatchRampUp

# Number of samples in the fingerprint of a stream.
_COMPARED = 8


class SampleStream(IterableDataset):
    """Samples of a stream, pass after pass, which Trainer resumes at the position of a checkpoint.

        SampleStream(load_dataset("parquet", data_files="s3://bucket/*.parquet", streaming=True)["train"])
        SampleStream(StreamingDataset(remote="s3://bucket/set", replication=world_size, num_canonical_nodes=1))

    Every process reads the full stream. Ranks of a data-parallel replica get the same samples, other replicas get
    others. On resume, samples seen before are read again and skipped, except with MosaicML datasets, which seek.

    Args:
        rows: `IterableDataset` of `datasets`, `StreamingDataset` of MosaicML's streaming, or any iterable that restarts
            with every iteration. It must yield the same samples in the same order each time, so shuffling needs a seed;
            its `set_epoch`, if any, is called with the index of the pass.
        passes (`int`, *optional*): number of passes; endless by default.
        name (`str`, *optional*): stored in checkpoints; a run does not resume with a stream of another name.

    Attributes:
        seen (`int`, defaults to 0): samples used by an earlier run; Trainer begins after them.
        begin (`int`, defaults to 0): first sample of an iteration.
        batch (`int`): samples of a step, if they are counted.
        is_mosaic (`bool`): whether `rows` is a MosaicML dataset.
        ramp_up (`BatchRampUp`, *optional*): as in `OrderedDataset`.

    Raises:
        DataError: no passes, `rows` that do not restart or are an ordered dataset; during iteration: no samples, or
            several workers.
    """

    def __init__(self, rows: Iterable[Any], *, passes: int | None = None, name: str | None = None):
        # Activate the patches: a stock Trainer would have one rank read for all, even with an unparallelized model.
        PATCH_REGISTRY.activate()
        if passes is not None and passes < 1:
            raise DataError(f"passes = {passes}: expected 1 or more.")
        if isinstance(rows, OrderedDataset):
            raise DataError(
                f"{type(rows).__name__} has its own order and resumes without a stream. Pass it to Trainer directly."
            )
        if isinstance(rows, Iterator):
            raise DataError(
                f"{type(rows).__name__} is an iterator, which cannot restart. Pass an iterable that starts from the "
                "beginning each time."
            )
        self.rows, self.passes = rows, passes
        self.seen = self.begin = self.batch = 0
        self.ramp_up: BatchRampUp | None = None
        self.order_key: dict[str, Any] = {"kind": "stream", "name": name}
        self.is_mosaic = _is_mosaic(rows)
        if self.is_mosaic:
            mosaic: Any = rows
            if mosaic.num_canonical_nodes is None:
                raise DataError(
                    "num_canonical_nodes is not set: the sample order would depend on the number of hosts. Set it."
                )
            names = ("shuffle", "shuffle_seed", "shuffle_algo", "num_canonical_nodes", "sampling_method")
            self.order_key |= {"rows": len(mosaic)} | {name: vars(mosaic)[name] for name in names}

    def fingerprint(self) -> str:
        """Returns a hash of the first samples, which differs for another order or other samples."""
        digest = hashlib.sha256()
        # MosaicML: hash the first stored samples; the arguments in `order_key` determine the order.
        rows: Any = self.rows
        first = map(rows.__getitem__, range(len(rows))) if self.is_mosaic else _pass(rows, 0, 0)
        for row in itertools.islice(first, _COMPARED):
            digest.update(pickle.dumps(_values(row)))
        return digest.hexdigest()[:16]

    def get_full_index(self, sample: int) -> int:
        """Returns the position of a sample in the full stream."""
        return sample

    def sample_at(self, place: int) -> int:
        """Returns the sample at a position."""
        return place

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise DataError(f"A stream cannot be split over {worker.num_workers} workers. Use 0 or 1.")
        left = self.begin
        for number in itertools.count() if self.passes is None else range(self.passes):
            size = 0
            for size, row in enumerate(_pass(self.rows, number, left), 1):
                if size > left:
                    yield row
            if size == 0:
                raise DataError(f"pass {number} over the stream yields no samples.")
            left = max(0, left - size)


def _pass(rows: Any, number: int, left_out: int) -> Iterator[Any]:
    """Yields the samples of a pass; the first `left_out` ones may be placeholders."""
    if _is_mosaic(rows):
        size = len(rows)
        place = min(left_out, size - 1)
        # Build the state in MosaicML's format instead of querying it: another rank may be writing the shared state.
        # Every rank reads all samples, as on a single host.
        rows.next_epoch = number
        rows.load_state_dict({
            "epoch": number,
            "sample_in_epoch": place,
            "num_canonical_nodes": rows.num_canonical_nodes,
            "shuffle_seed": rows.shuffle_seed,
            "initial_physical_nodes": 1,
        })  # fmt: skip
        yield from itertools.chain(itertools.repeat(None, place), rows)
        return
    set_epoch = getattr(rows, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(number)
    yield from rows


def _values(row: Any) -> Any:
    """Returns a sample with its tensors and arrays as bytes, which do not depend on device or memory layout."""
    if isinstance(row, Mapping):
        return [(name, _values(value)) for name, value in row.items()]
    if isinstance(row, list | tuple):
        return [_values(value) for value in row]
    if isinstance(row, torch.Tensor):
        row = row.detach().cpu()
        return str(row.dtype), tuple(row.shape), row.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return (row.dtype.str, row.shape, row.tobytes()) if isinstance(row, np.ndarray) else row


def _is_mosaic(rows: Any) -> bool:
    """Returns whether `rows` is a MosaicML dataset, without importing the package."""
    mosaic = sys.modules.get("streaming")
    return mosaic is not None and isinstance(rows, mosaic.StreamingDataset)

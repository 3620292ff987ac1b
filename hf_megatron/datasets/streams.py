"""Rows that come one after the other and cannot be asked for by number, in their order, from any of them on."""

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

# Rows by which a stream is told from another one.
_COMPARED = 8


class SampleStream(IterableDataset):
    """Rows of a stream, pass after pass, which Trainer takes from where a checkpoint had ended.

        SampleStream(load_dataset("parquet", data_files="s3://bucket/*.parquet", streaming=True)["train"])
        SampleStream(StreamingDataset(remote="s3://bucket/set", replication=world_size, num_canonical_nodes=1))

    All processes that read it read all of it; those of a replica are given the same rows, other replicas others. Rows
    that a run has seen are read again before it goes on; of MosaicML's sets they are not.

    Args:
        rows: `IterableDataset` of `datasets`, `StreamingDataset` of MosaicML's streaming, or what begins anew whenever
            it is iterated over. It has to give the same rows in the same order each time, so that what shuffles needs a
            seed; what has `set_epoch` is told which pass it is.
        passes (`int`, *optional*): how often rows are read; without an end by default.
        name (`str`, *optional*): a checkpoint says it, and a run whose stream has another one does not go on.

    Attributes:
        seen (`int`, defaults to 0): rows that an earlier run had: Trainer begins with the next.
        begin (`int`, defaults to 0): with which row an iteration begins.
        batch (`int`): rows of a step, where something counts them.
        is_mosaic (`bool`): whether rows are a set of MosaicML's.
        ramp_up (`BatchRampUp`, *optional*): as of `OrderedDataset`.

    Raises:
        DataError: no passes, rows that do not begin anew or have an order of their own; while it is read: no rows, or
            several workers that read it.
    """

    def __init__(self, rows: Iterable[Any], *, passes: int | None = None, name: str | None = None):
        # A plain Trainer would let one rank read for all, also for a model that is not parallelized.
        PATCH_REGISTRY.activate()
        if passes is not None and passes < 1:
            raise DataError(f"passes = {passes}: expected 1 or more.")
        if isinstance(rows, OrderedDataset):
            raise DataError(f"{type(rows).__name__} has an order of its own and goes on by itself: give Trainer that.")
        if isinstance(rows, Iterator):
            raise DataError(f"{type(rows).__name__}: goes on where it was left. Expected what begins anew each time.")
        self.rows, self.passes = rows, passes
        self.seen = self.begin = self.batch = 0
        self.ramp_up: BatchRampUp | None = None
        self.order_key: dict[str, Any] = {"kind": "stream", "name": name}
        self.is_mosaic = _is_mosaic(rows)
        if self.is_mosaic:
            mosaic: Any = rows
            if mosaic.num_canonical_nodes is None:
                raise DataError(
                    "num_canonical_nodes is missing: the order of the set's rows would depend on the hosts."
                )
            names = ("shuffle", "shuffle_seed", "shuffle_algo", "num_canonical_nodes", "sampling_method")
            self.order_key |= {"rows": len(mosaic)} | {name: vars(mosaic)[name] for name in names}

    def fingerprint(self) -> str:
        """Returns a hash of the first rows, which another order, or other rows, do not have."""
        found = hashlib.sha256()
        # Of a set of MosaicML's, whose order says its arguments, those that are written first.
        rows: Any = self.rows
        first = map(rows.__getitem__, range(len(rows))) if self.is_mosaic else _pass(rows, 0, 0)
        for row in itertools.islice(first, _COMPARED):
            found.update(pickle.dumps(_values(row)))
        return found.hexdigest()[:16]

    def place_of(self, sample: int) -> int:
        """Returns where a row is, of all."""
        return sample

    def sample_at(self, place: int) -> int:
        """Returns which row is at a place."""
        return place

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise DataError(
                f"a stream that {worker.num_workers} workers read: each would read a part. Expected 1 or 0."
            )
        left = self.begin
        for number in itertools.count() if self.passes is None else range(self.passes):
            size = 0
            for size, row in enumerate(_pass(self.rows, number, left), 1):
                if size > left:
                    yield row
            if size == 0:
                raise DataError(f"pass {number} over the stream has no row.")
            left = max(0, left - size)


def _pass(rows: Any, number: int, left_out: int) -> Iterator[Any]:
    """Yields the rows of a pass; those that are left out may be anything."""
    if _is_mosaic(rows):
        size = len(rows)
        place = min(left_out, size - 1)
        # In its own words, and without asking for them: another rank may be writing what would be read. All rows are
        # each rank's, as on one host.
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
    """Returns a row with its tensors and arrays as their bytes, which are the same wherever they lie."""
    if isinstance(row, Mapping):
        return [(name, _values(value)) for name, value in row.items()]
    if isinstance(row, list | tuple):
        return [_values(value) for value in row]
    if isinstance(row, torch.Tensor):
        row = row.detach().cpu()
        return str(row.dtype), tuple(row.shape), row.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return (row.dtype.str, row.shape, row.tobytes()) if isinstance(row, np.ndarray) else row


def _is_mosaic(rows: Any) -> bool:
    """Tells whether rows are a set of MosaicML's, without importing it."""
    mosaic = sys.modules.get("streaming")
    return mosaic is not None and isinstance(rows, mosaic.StreamingDataset)

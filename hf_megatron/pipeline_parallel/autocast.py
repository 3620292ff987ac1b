"""Autocast in a pipeline, whose stages run the microbatches of a batch in turns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype that autocast casts to on a kind of device, where it is on."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def quiet_autocast() -> Iterator[None]:
    """Casts weights for each microbatch: a cached cast would be part of several graphs."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)

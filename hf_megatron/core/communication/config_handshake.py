"""Start-up handshake: all ranks hold the same configuration before anything is built."""

from typing import Any

import torch.distributed as dist

from ...errors import ConfigError


def agree(facts: dict[str, Any]) -> None:
    """Compares `facts` over all ranks; raises `ConfigError` on each, naming the first field that differs."""
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, facts)
    for name in sorted({key for other in gathered for key in other}):
        values = [other.get(name) for other in gathered]
        if any(value != values[0] for value in values):
            listing = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ConfigError(f"The ranks disagree on {name}: {listing}.")

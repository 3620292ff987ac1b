"""Saves and restores a rank's RNG states: Python, numpy, and torch on the CPU and its device."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy
import torch

from .packed_state import read_packed, write_packed


def file_name(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"


def save(directory: Path, rank: int) -> None:
    """Writes the states of all generators of this rank."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    write_packed(directory / file_name(rank), state)


def load(directory: Path, counterpart: int | None, *, stream: int, step: int) -> None:
    """Restores the generator states of a save.

    With a different number of dp ranks, the first one continues the states of the save's first rank, from which
    samplers without a generator draw the order of the data. Others that restored the same states would apply the same
    dropout mask to other batches, so their generators are reseeded from the step and the dp rank.

    Args:
        counterpart (`int`, *optional*): rank of the save whose states are restored.
        stream (`int`): the dp rank; model-parallel ranks share it.
        step (`int`): the optimizer step.
    """
    if counterpart is None and stream == 0:
        counterpart = 0
    if counterpart is not None:
        state = read_packed(directory / file_name(counterpart))
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
        return
    first = read_packed(directory / file_name(0))
    digest = hashlib.blake2b(first["torch"].numpy().tobytes(), digest_size=8)
    digest.update(f"{step}:{stream}".encode())
    seed = int.from_bytes(digest.digest()[:4], "big")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)

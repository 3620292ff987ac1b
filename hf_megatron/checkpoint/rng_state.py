"""The random generators of a rank: Python's, numpy's, torch's on CPU and on its device."""

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
    """Writes the state of every generator of this rank."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    write_packed(directory / file_name(rank), state)


def load(directory: Path, counterpart: int | None, *, stream: int, step: int) -> None:
    """Continues every generator where the save left it.

    With other batch streams no rank has a counterpart, and two ranks that continued the same generator would drop the
    same entries of different batches: the generators start anew from the step and the number of the batch stream.

    Args:
        counterpart (`int`, *optional*): the rank that saved what this one continues.
        stream (`int`): the dp rank; ranks that share a batch share a stream.
    """
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

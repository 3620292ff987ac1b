"""State of a training loop in a sharded checkpoint: learning-rate schedules and random generators."""

import warnings
from pathlib import Path
from typing import Any

from ..core.communication.rank_errors import rank_and_size
from ..parallel_state import parallel_state
from . import rng_state
from .reader import Checkpoint, open_checkpoint

# File with the states of schedulers and loss scaler.
LOOP = "loop.safetensors"


def open_verified(path: Any, model: Any) -> Checkpoint:
    """Opens a checkpoint on all ranks; compares checksums unless the model's configuration disables it."""
    state = parallel_state(model)
    return open_checkpoint(path, verify=state is None or state.config.verify_checksums)


def advance_scheduler(scheduler: Any, steps: int) -> None:
    """Advances a new scheduler by a number of steps, for checkpoints whose scheduler state cannot be loaded."""
    with warnings.catch_warnings():
        # torch expects an optimizer step before each.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(steps):
            scheduler.step()


def restore_random_state(model: Any, directory: Path, step: int) -> None:
    """Restores the random generators, or reseeds them if the layout deals out batches differently.

    Converted checkpoints have no random states; the generators stay as they are.
    """
    state, saved = parallel_state(model), Checkpoint(directory).metadata
    if saved.get("converted"):
        return
    layout = None if state is None else state.config
    sizes = ("tp_size", "dp_size", "cp_size", "pp_size", "ep_size")
    before = saved.get("layout") or {}
    same = saved.get("world_size") == rank_and_size(None)[1] and all(
        getattr(layout, name, 1) == before.get(name, 1) for name in sizes
    )
    stream = 0 if state is None else state.mesh.dp_rank
    counterpart = rank_and_size(None)[0] if same else None
    if not same and before.get("dp_size", 1) == (1 if layout is None else layout.dp_size):
        # The ranks of a model-parallel group share their random numbers: samples continue as in a single process.
        counterpart = stream * (saved.get("world_size", 1) // before.get("dp_size", 1))
    rng_state.load(directory, counterpart, stream=stream, step=step)

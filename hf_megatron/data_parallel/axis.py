"""Data parallelism as one of a model's axes."""

from typing import Any

from ..parallel_state import ParallelState
from .engine import DataParallel
from .fsdp import shard_weights
from .fsdp_checks import install_guards

NAME = "dp"


def place(model: Any, state: ParallelState) -> None:
    """Gradients are averaged over dp whatever a claim says of other axes: nothing is placed."""


def install(model: Any, state: ParallelState) -> None:
    """Shares out gradients, or the weights themselves, over the data parallel ranks."""
    if state.shards_weights:
        name = type(model).__name__
        # First of all axes, so that FSDP2's hooks lie inside those that move activations between ranks.
        shard_weights(model, state, [] if state.cut is None else state.cut.ends(model))
        # FSDP2's pre-hook exchanges the parameters that the loop knows. Its hook marks the outputs for backward, so
        # outputs are replaced after it; full logits are computed before it splits the head's weight again.
        state.hooks.enclose(["pending loss"])
        # FSDP2 makes a class of its own; Trainer shifts labels for label smoothing by the name.
        state.patches.replace(model, "_get_name", lambda: name)
    state.data_parallel = engine = DataParallel(model, state)
    if state.shards_weights:
        install_guards(model, state.hooks, lambda: engine.has_run)

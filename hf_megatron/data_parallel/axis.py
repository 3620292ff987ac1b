"""Data-parallel axis: installs the gradient engine, or FSDP2 for ZeRO stage 3."""

from typing import Any

from ..parallel_state import ParallelState
from .engine import DataParallel
from .fsdp import shard_weights
from .fsdp_checks import install_guards

NAME = "dp"


def place(model: Any, state: ParallelState) -> None:
    """Does nothing: data parallelism does not change parameter shardings at planning."""


def install(model: Any, state: ParallelState) -> None:
    """Attaches the data-parallel engine; in ZeRO stage 3 FSDP2 shards the weights over the dp ranks first."""
    if state.shards_weights:
        name = type(model).__name__
        # Runs before all other axes, so that FSDP2's hooks are inside those that move activations between ranks.
        shard_weights(model, state, [] if state.cut is None else state.cut.ends(model))
        # FSDP2's forward pre-hook swaps the sharded parameters for unsharded ones. Its forward hook marks the outputs
        # for backward, so outputs are replaced after it; full logits are computed before it reshards the head.
        state.hooks.enclose(["pending loss"])
        # FSDP2 changes the model's class; Trainer decides by the class name whether label smoothing shifts labels.
        state.patches.replace(model, "_get_name", lambda: name)
    state.data_parallel = engine = DataParallel(model, state)
    if state.shards_weights:
        install_guards(model, state.hooks, lambda: engine.has_run)

"""Context parallelism as one of a model's axes."""

import dataclasses
from typing import Any

from ..errors import UnsupportedError
from ..layer_list import find_layers
from ..parallel_state import ParallelState
from .attention import ContextGroups
from .stack import ContextStack

NAME = "cp"
# Of a layer, those with an entry for each token.
_ARGUMENTS = ("position_ids", "position_embeddings")


def place(model: Any, state: ParallelState) -> None:
    """Has gradients added up over the ranks that share rows, on the way of those that dp ranks average."""
    if state.axes.size(NAME) == 1:
        return
    if state.shards_weights:
        raise UnsupportedError(
            f"MegatronConfig.zero_stage = 3 with cp_size = {state.config.cp_size}: gradients would not be added up "
            "over the cp ranks. Use zero_stage=2."
        )
    for name, claim in state.claims.items():
        rule = dataclasses.replace(claim.gradient, average="dp_cp")
        state.claims[name] = dataclasses.replace(claim, gradient=rule)
    # A pipeline takes layers away later.
    state.placed[NAME] = find_layers(model, state.spec, "cp_size")


def install(model: Any, state: ParallelState) -> None:
    """Cuts rows before the first layer and joins them behind the last one."""
    ranks = state.axes.size(NAME)
    if ranks == 1:
        return
    group = state.mesh.group(NAME)
    scheme = state.config.cp_comm_type or "p2p"
    groups = ContextGroups(heads=group) if scheme == "a2a" else ContextGroups(None, group, scheme == "all_gather")
    layers: Any = model.get_submodule(state.placed[NAME])
    arguments = frozenset((*_ARGUMENTS, *state.spec.sequence_arguments))
    ContextStack(groups, ranks, group, arguments).install(model, layers)

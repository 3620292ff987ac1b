"""Pipeline parallelism as one of a model's axes."""

import types
from typing import Any

from ..compat.transformers_loading import renamed_by_loader
from ..data_parallel.engine import DataParallel
from ..parallel_state import ParallelState
from .engine import Pipeline
from .module_placement import register_off_stage_weights, register_side_weights, share_tied_weights
from .parameter_counts import ParameterCounts
from .split_model import ModelPartition, cut

NAME = "pp"


def place(model: Any, state: ParallelState) -> None:
    """Leaves of a meta model what this rank's stages own; raises as `cut`."""
    if state.axes.size(NAME) == 1:
        return
    state.names = tuple(model.state_dict())
    counts = ParameterCounts.of_full(model)
    state.cut = cut(model, state.spec, state.config, state.axes)
    gone = set(state.names) - model.state_dict().keys()
    state.off_stage_names = frozenset(gone | renamed_by_loader(model, gone))
    state.placed[NAME] = counts


def install(model: Any, state: ParallelState) -> None:
    """Makes a call of the model run the schedule."""
    if isinstance(state.cut, ModelPartition) and isinstance(state.data_parallel, DataParallel):
        if (leaving := state.leaving) is not None:
            row = state.cut.layers
            state.cut.boundary.leaving = lambda hidden, layer: leaving(hidden, row.list_of(layer))
        counts: ParameterCounts = state.placed[NAME]
        state.cut.boundary.is_filled = True
        state.cut.boundary.owner = state.data_parallel
        register_side_weights(model, state.cut.off_stage_names, state.data_parallel, state.mesh.device)
        register_off_stage_weights(model, counts.sizes.keys())
        share_tied_weights(model, state.cut.sources)
        state.data_parallel.scan()
        state.patches.replace(model, "num_parameters", types.MethodType(counts.bound(state), model))
        state.pipeline = Pipeline(model, state, state.cut, state.data_parallel)

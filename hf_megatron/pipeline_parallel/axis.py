"""Pipeline-parallel axis: splits the layers at planning, and replaces the forward after loading."""

import types
from typing import Any

from ..compat.transformers_loading import renamed_by_loader
from ..data_parallel.engine import DataParallel
from ..parallel_state import ParallelState, WeightNames
from .engine import install_pipeline
from .module_placement import register_off_stage_weights, register_side_weights, share_tied_weights
from .parameter_counts import ParameterCounts
from .split_model import ModelPartition, cut

NAME = "pp"


def place(model: Any, state: ParallelState) -> None:
    """Keeps only this rank's stages of a meta model; raises as `cut` does."""
    if state.axes.size(NAME) == 1:
        return
    names = tuple(model.state_dict())
    counts = ParameterCounts.of_full(model)
    state.cut = cut(model, state.spec, state.config, state.axes)
    # State dict names that this rank does not load, before and after the loader's renaming.
    gone = set(names) - model.state_dict().keys()
    state.names = WeightNames(names, frozenset(gone | renamed_by_loader(model, gone)))
    state.placed[NAME] = counts


def install(model: Any, state: ParallelState) -> None:
    """Replaces the model's forward by the schedule."""
    if isinstance(state.cut, ModelPartition) and isinstance(state.data_parallel, DataParallel):
        if (leaving := state.leaving) is not None:
            row = state.cut.layers
            state.cut.boundary.leaving = lambda hidden, layer: leaving(hidden, row.get_layer_list(layer))
        counts: ParameterCounts = state.placed[NAME]
        # From here on placeholders list off-stage weights; before, no loader may look for them.
        state.cut.boundary.is_filled = True
        state.cut.boundary.owner = state.data_parallel
        register_side_weights(model, state.cut.off_stage_names, state.data_parallel, state.mesh.device)
        register_off_stage_weights(model, counts.names)
        share_tied_weights(model, state.cut.sources)
        state.data_parallel.scan()
        state.patches.replace(model, "num_parameters", types.MethodType(counts.bound(state), model))
        state.pipeline = install_pipeline(model, state, state.cut, state.data_parallel)

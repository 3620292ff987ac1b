"""Collects weights on rank 0 for scripts that take a state dict on every rank and write it on one rank.

After `Trainer.train()`, the `state_dict()` that a script calls gathers every full tensor in CPU memory of rank 0, where
it is freed with the returned dictionary. The trained weights of a model with adapters are collected when training ends,
because scripts read these from `named_parameters()`, which only lists them.
"""

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.collected_values import Collection, attach_value
from ..core.communication.call_stack import is_called_by_user
from ..core.off_stage import is_off_stage
from ..core.placement import ADAPTER
from ..parallel_state import ParallelState, parallel_state, unwrap_parallel_model
from .gather_full import fetch, full_state_dict
from .stage_consistency import merge_owned_tensors


def _is_partial(tensor: Any) -> bool:
    """Returns whether a rank lacks values of a tensor of any shape."""
    return isinstance(tensor, DTensor) or is_off_stage(tensor)


def collect_state_dict(model: Any, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Attaches full values to a state dict that a script takes after training; a post-hook of `state_dict()`.

    Collective in that case. Before and during training nothing is collected: training loops read state dicts in every
    step, for averages or to count names.
    """
    state = parallel_state(model)
    if state is None or state.collection is None or not (state.has_dtensors or state.cut is not None):
        return
    if is_called_by_user(("torch",)):
        full = full_state_dict(model)
        for name, tensor in state_dict.items():
            if name.startswith(prefix) and _is_partial(tensor):
                attach_value(tensor, full.get(name.removeprefix(prefix)), state.collection)


def follow_weights(model: Any) -> None:
    """Ends the model's collections with the next optimizer step or `load_state_dict`."""
    state = parallel_state(model)
    assert state is not None and state.data_parallel is not None
    state.data_parallel.callbacks.on_stepped.append(partial(end_collection, state))

    def renew(*args: Any) -> None:
        if state.collection is not None:
            end_collection(state)
            state.collection = Collection()

    model.register_load_state_dict_pre_hook(renew)


def end_collection(state: ParallelState) -> None:
    """Marks what was collected as outdated, and collects nothing until training ends again."""
    if state.collection is not None:
        state.collection.is_current = False
        state.collection = None


def collect_after_training(model: Any) -> None:
    """Collects the trained weights of a model with adapters, and state dicts that are taken from now on; collective."""
    inner = unwrap_parallel_model(model)
    state = parallel_state(inner)
    assert state is not None
    state.collection = Collection()
    if not any(sharding.style == ADAPTER for sharding in state.shardings.values()):
        return
    trained = {name: tensor for name, tensor in inner.named_parameters() if tensor.requires_grad}
    local: dict[str, Tensor] = {name: tensor for name, tensor in trained.items() if not is_off_stage(tensor)}
    for name, entry in merge_owned_tensors(state, local).items():
        full = fetch(inner, state, name, entry, local.get(name))
        tensor: Any = trained.get(name)
        if _is_partial(tensor):
            attach_value(tensor, full, state.collection)

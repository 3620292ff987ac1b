"""Patched `generate()`: the ranks of a model-parallel group sample the same tokens and stop at the same one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.axes import REPLICA_AXES
from ...core.communication.rng import broadcast_state
from ...core.mesh import ParallelMesh
from ...errors import UnsupportedError
from ...parallel_state import parallel_state

# Criteria that depend only on tokens and scores, which are identical on every rank.
_ALIKE = ("ConfidenceCriteria", "EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria")


class AgreedCriterion:
    """A stopping criterion that may differ between ranks, such as a time limit; the first rank's decision is used."""

    def __init__(self, criterion: Any, mesh: ParallelMesh):
        self.criterion, self.mesh = criterion, mesh

    def __getattr__(self, name: str) -> Any:
        if name in ("criterion", "mesh"):
            raise AttributeError(name)
        return getattr(self.criterion, name)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.as_tensor(self.criterion(input_ids, scores, **kwargs), device=self.mesh.device)
        decided = done.to(torch.uint8).contiguous()
        # Rank 0 of each axis broadcasts its `[batch]` decisions, so no rank leaves the generation loop early.
        for group in (self.mesh.tp_group, self.mesh.group("cp"), self.mesh.pp_group):
            dist.broadcast(decided, group=group, group_src=0)
        return decided.to(input_ids.device).bool()


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Samples the same tokens, `(batch, sequence)`, on all ranks of a model-parallel group, whatever their seeds."""
    state = parallel_state(self)
    if state is not None:
        mesh = state.mesh
        broadcast_state(mesh.device, *(mesh.host_group(axis) for axis in REPLICA_AXES))
        if state.in_lockstep and mesh.dp_size > 1 and kwargs.get("synced_gpus") is None:
            # Other data-parallel ranks generate for other prompts but hold shards of these weights or experts: every
            # rank keeps calling forward until the last one has finished.
            kwargs["synced_gpus"] = True
    return original(self, *args, **kwargs)


def call_encoder(
    original: Callable, self: Any, inputs_tensor: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Runs the encoder with its ZeRO-3 weights all-gathered; upstream calls it outside of the model's forward.

    With pipeline parallelism the modality encoders are on the first stage: images go through the model's forward
    together with the prompt, so nothing is called here.
    """
    state = parallel_state(self)
    if state is not None and state.cut is not None and not self.config.is_encoder_decoder:
        return model_kwargs
    if state is None or not state.shards_weights:
        return original(self, inputs_tensor, model_kwargs, *args, **kwargs)
    assert state.data_parallel is not None
    with state.data_parallel.full_root():
        return original(self, inputs_tensor, model_kwargs, *args, **kwargs)


def init_continuous_batching(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Rejects a model that is split over ranks: each rank would schedule requests by its own clock and memory."""
    state = parallel_state(self)
    if state is not None and (state.config.ranks_per_replica > 1 or state.shards_weights):
        raise UnsupportedError(
            f"{type(self).__name__}.generate_batch (continuous batching) is not supported on a model sharded over "
            "ranks. Use generate(), or serve the saved model with an inference engine."
        )
    return original(self, *args, **kwargs)


def get_stopping_criteria(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the stock criteria; criteria that may differ between ranks are wrapped in `AgreedCriterion`."""
    criteria = original(self, *args, **kwargs)
    state = parallel_state(self)
    if state is None or state.config.ranks_per_replica == 1:
        return criteria
    # Imported here because importing the library must not pull in transformers' tokenizers.
    from transformers.generation import stopping_criteria

    synced = {getattr(stopping_criteria, name) for name in _ALIKE}
    return type(criteria)(one if type(one) in synced else AgreedCriterion(one, state.mesh) for one in criteria)


def valid_auto_compile_criteria(original: Callable, self: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns False for a pipelined model, whose forward sends and receives between stages and cannot be compiled."""
    state = parallel_state(self)
    return False if state is not None and state.pipeline is not None else original(self, *args, **kwargs)


def get_static_cache_init_shape(original: Callable, self: Any) -> Any:
    """Returns None for a parallelized model, because upstream would count the heads of the full model.

    The shape only saves compiled prefills an allocation.
    """
    return original(self) if parallel_state(self) is None else None

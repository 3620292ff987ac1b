"""`generate()`: the ranks that share a model draw the same tokens and stop at the same one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.communication.rng import broadcast_state
from ...core.mesh import ParallelMesh
from ...errors import UnsupportedError
from ...parallel_state import parallel_state

# Criteria that decide by tokens and scores alone, which are the same on every rank.
_ALIKE = ("ConfidenceCriteria", "EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria")


class AgreedCriterion:
    """A criterion that may decide differently on different ranks, such as one that reads a clock: the first decides."""

    def __init__(self, criterion: Any, mesh: ParallelMesh):
        self.criterion, self.mesh = criterion, mesh

    def __getattr__(self, name: str) -> Any:
        if name in ("criterion", "mesh"):
            raise AttributeError(name)
        return getattr(self.criterion, name)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done = torch.as_tensor(self.criterion(input_ids, scores, **kwargs), device=self.mesh.device)
        decided = done.to(torch.uint8).contiguous()
        for group in (self.mesh.tp_group, self.mesh.group("cp"), self.mesh.pp_group):
            dist.broadcast(decided, group=group, group_src=0)
        return decided.to(input_ids.device).bool()


def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws the same tokens, `(batch, sequence)`, on every rank that shares the model, whatever seeds the user set."""
    state = parallel_state(self)
    if state is not None:
        mesh = state.mesh
        broadcast_state(mesh.device, *(mesh.host_group(axis) for axis in ("tp", "cp", "pp")))
        if state.in_lockstep and mesh.dp_size > 1 and kwargs.get("synced_gpus") is None:
            # Ranks with other prompts hold parts of the weights: all go on until the last one has finished.
            kwargs["synced_gpus"] = True
    return original(self, *args, **kwargs)


def call_encoder(
    original: Callable, self: Any, inputs_tensor: Any, model_kwargs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls the encoder, as stock does outside of the model's forward, with the weights that stage 3 splits there.

    The modality encoders of a pipeline are on the first stage: images go through the model's forward with the prompt.
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
    """Refuses a model that is split over ranks, each of which would schedule requests by its own clock and memory."""
    state = parallel_state(self)
    if state is not None and (state.config.ranks_per_replica > 1 or state.shards_weights):
        raise UnsupportedError(
            f"{type(self).__name__}.generate_batch (continuous batching) on a model that is split over ranks: use "
            "generate(), or serve the saved model with an inference engine."
        )
    return original(self, *args, **kwargs)


def get_stopping_criteria(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns stock's criteria, those that may decide differently on different ranks as `AgreedCriterion`."""
    criteria = original(self, *args, **kwargs)
    state = parallel_state(self)
    if state is None or state.config.ranks_per_replica == 1:
        return criteria
    # Here, so that an import of the library does not bring transformers' tokenizers in.
    from transformers.generation import stopping_criteria

    identical = {getattr(stopping_criteria, name) for name in _ALIKE}
    return type(criteria)(one if type(one) in identical else AgreedCriterion(one, state.mesh) for one in criteria)


def valid_auto_compile_criteria(original: Callable, self: Any, *args: Any, **kwargs: Any) -> bool:
    """Refuses to compile a pipeline's forward, which sends and receives between its stages."""
    state = parallel_state(self)
    return False if state is not None and state.pipeline is not None else original(self, *args, **kwargs)


def get_static_cache_init_shape(original: Callable, self: Any) -> Any:
    """Returns no shape: stock's only spares compiled prefills an allocation, and knows nothing of a rank's heads."""
    return original(self) if parallel_state(self) is None else None

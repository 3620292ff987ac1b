"""Trained prompts: prefix embeddings in front of the input, and prefix keys and values.

Every model-parallel rank computes full prompts from replicated parameters. With a pipeline the first stage owns the
parameters, and other stages create tensors of the same shapes. A rank keeps the keys and values of its own heads.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache

from ...core.communication.collectives import copy_to_ranks
from ...core.communication.full_tensor import accept_full_tensors
from ...core.placement import GradientRule, Placement, count_shared_copies
from ...parallel_state import ParallelState
from ...pipeline_parallel.off_stage_module import Placeholder
from ...tensor_parallel.axis import FORWARDS
from ...tensor_parallel.local_parameters import read_locally
from .site import Site

# Name of the prompt encoders in a `PeftModel` and in a model.
PROMPTS = "prompt_encoder"


def shard_prompts(encoders: nn.ModuleDict, model: Any, state: ParallelState) -> None:
    """Registers the shardings of the prompt encoders' parameters, by adapter, and adds them to the model."""
    if PROMPTS not in model._modules:
        model.add_module(PROMPTS, encoders)
    is_off_stage = state.cut is not None and state.cut.owner(PROMPTS) != state.axes.rank("pp")
    copies = count_shared_copies(state.shardings.values(), state.axes)
    site = Site(PROMPTS, encoders, PROMPTS, state, copies, is_off_stage)
    for name, module in encoders.named_modules():
        param_names = [param_names for param_names, parameter in module._parameters.items() if parameter is not None]
        if not param_names or site.has_sharding(f"{name}.{param_names[0]}"):
            continue
        for parameter in param_names:
            site.place(module, parameter, f"{name}.{parameter}", Placement(), GradientRule())
        if site.is_off_stage:
            continue
        module.register_load_state_dict_pre_hook(accept_full_tensors)
        if site.splits:
            read_locally(module, state.mesh, site.forwards, frozenset())
    if is_off_stage:
        stands = next(module for module in model.modules() if isinstance(module, Placeholder))
        stands.list_around(encoders)


def embedded(embedding: Any, ids: Tensor) -> Tensor:
    """Embeds tokens `[batch, tokens]` as `[batch, tokens, hidden]`, without a graph if the embedding is frozen.

    Gradient checkpointing makes embedding outputs require a gradient, which is unused in a prompt.
    """
    embeddings = embedding(ids)
    return embeddings if embedding.weight.requires_grad else embeddings.detach()


def reading_prompts(state: ParallelState) -> AbstractContextManager[None]:
    """Returns a context in which the prompt parameters are local tensors, as during a forward."""
    return state.placed[FORWARDS].enter_module() if FORWARDS in state.placed else nullcontext()


def local_prompt(prompt: Any, state: ParallelState) -> Any:
    """Returns this rank's part of a prompt: embeddings `[batch, tokens, hidden]`, or keys and values of its heads."""
    if isinstance(prompt, Tensor):
        return prompt
    ranks, rank = state.axes.size("tp"), state.axes.rank("tp")
    if ranks == 1:
        return prompt
    # Prefixes only extend the decoder's self-attention cache.
    cache: Any = prompt.self_attention_cache if isinstance(prompt, EncoderDecoderCache) else prompt
    for layer in cache.layers:
        # Layers of another shape than the prefix, such as linear attention, have no cache.
        if layer.is_initialized:
            layer.keys, layer.values = (_own_heads(part, ranks, rank, state) for part in (layer.keys, layer.values))
    return prompt


def _own_heads(unsharded: Tensor, ranks: int, rank: int, state: ParallelState) -> Tensor:
    """Slices this rank's heads from `[batch, heads, tokens, head_dim]`; the backward sums gradients over tp."""
    heads = unsharded.shape[1]
    unsharded = copy_to_ranks(unsharded, state.mesh.tp_group)
    if heads >= ranks:
        return unsharded.narrow(1, rank * heads // ranks, heads // ranks)
    # Fewer KV heads than ranks: neighboring ranks share a head.
    return unsharded.narrow(1, rank // (ranks // heads), 1)

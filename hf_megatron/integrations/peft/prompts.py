"""Prompts that are trained: parameters in front of a model, and keys and values of tokens that are not there.

Every rank of a batch makes whole prompts from whole parameters; of a pipeline the first stage has them, and others
make tensors of their shapes. Of keys and values a rank takes its heads'.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache

from ...core.communication.collectives import copy_to_ranks
from ...core.communication.full_tensor import accept_full_tensors
from ...core.placement import GradientRule, Placement, copies_of_model
from ...parallel_state import ParallelState
from ...pipeline_parallel.off_stage_module import Placeholder
from ...tensor_parallel.axis import FORWARDS
from ...tensor_parallel.local_parameters import read_locally
from .site import Site

# Of what makes prompts, in a `PeftModel` and in a model.
PROMPTS = "prompt_encoder"


def shard_prompts(encoders: nn.ModuleDict, model: Any, state: ParallelState) -> None:
    """Claims and places the parameters that make prompts, by adapter, and has the model list them."""
    if PROMPTS not in model._modules:
        model.add_module(PROMPTS, encoders)
    is_off_stage = state.cut is not None and state.cut.owner(PROMPTS) != state.axes.rank("pp")
    copies = copies_of_model(state.shardings.values(), state.axes)
    site = Site(PROMPTS, encoders, PROMPTS, state, copies, is_off_stage)
    for name, module in encoders.named_modules():
        own = [own for own, parameter in module._parameters.items() if parameter is not None]
        if not own or site.has_sharding(f"{name}.{own[0]}"):
            continue
        for parameter in own:
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
    """Embeds tokens `[rows, tokens]` as `[rows, tokens, hidden]`, without a graph where the embedding is frozen.

    Gradient checkpoints have outputs of embeddings require a gradient, which nobody reads behind a prompt.
    """
    found = embedding(ids)
    return found if embedding.weight.requires_grad else found.detach()


def reading_prompts(state: ParallelState) -> AbstractContextManager[None]:
    """Has the parameters that make prompts be plain tensors inside, as in a forward."""
    return state.placed[FORWARDS].of_module() if FORWARDS in state.placed else nullcontext()


def local_prompt(prompt: Any, state: ParallelState) -> Any:
    """Returns what a rank's model takes of a prompt: embeddings `[rows, tokens, hidden]`, or keys and values."""
    if isinstance(prompt, Tensor):
        return prompt
    ranks, rank = state.axes.size("tp"), state.axes.rank("tp")
    if ranks == 1:
        return prompt
    # Prefixes stand before a decoder's own tokens.
    cache: Any = prompt.self_attention_cache if isinstance(prompt, EncoderDecoderCache) else prompt
    for layer in cache.layers:
        # Layers of another shape than the prefix have none.
        if layer.is_initialized:
            layer.keys, layer.values = (_own_heads(part, ranks, rank, state) for part in (layer.keys, layer.values))
    return prompt


def _own_heads(unsharded: Tensor, ranks: int, rank: int, state: ParallelState) -> Tensor:
    """Cuts this rank's heads out of `[rows, heads, tokens, head dim]`; gradients of all ranks are added up."""
    heads = unsharded.shape[1]
    unsharded = copy_to_ranks(unsharded, state.mesh.tp_group)
    if heads >= ranks:
        return unsharded.narrow(1, rank * heads // ranks, heads // ranks)
    return unsharded.narrow(1, rank // (ranks // heads), 1)

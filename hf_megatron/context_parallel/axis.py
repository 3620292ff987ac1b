"""Context parallelism: checks of the model, and installation of the sequence split."""

from typing import Any

from torch import Tensor

from ..compat.transformers_models import reshapes_to_inputs
from ..core.communication.rng import StreamOfPart
from ..errors import UnsupportedError
from ..models.layers import find_full_sequence_blocks, find_layers
from ..parallel_state import ParallelState
from ..tensor_parallel.axis import GUARDS, REGIONS
from ..tensor_parallel.forward_checks import OutputChecks
from ..tensor_parallel.install_regions import leaves_layers_out
from ..tensor_parallel.layer_rng import SyncedRngState
from ..tensor_parallel.unsharded_head import is_plain_head, make_lazy
from ..tensor_parallel.vocab_parallel_head import VocabParallelHead
from .attention import ContextGroups
from .full_sequence_blocks import FullSequenceBlock
from .head_parallel_blocks import SharedHeadBlock, heads_to_share
from .sequence_split import ContextStack
from .user_hook_checks import UserHookChecks

NAME = "cp"
# Key of the `ContextStack`, which holds the distribution of the current sequence.
STACK = "context stack"
# Arguments of a layer with one entry per token.
_ARGUMENTS = ("position_ids", "position_embeddings", "moe_mm_token_type_ids")


def place(model: Any, state: ParallelState) -> None:
    """Finds the layers whose sequence is split; raises `UnsupportedError` if a model does not support it."""
    if state.axes.size(NAME) == 1:
        return
    if state.spec.cp.no_context_parallel is not None:
        raise UnsupportedError(
            f"model type {state.spec.model_type!r} does not support context parallelism: "
            f"{state.spec.cp.no_context_parallel} Set cp_size=1."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"MegatronConfig.cp_size = {state.config.cp_size}: {type(model).__name__} is an encoder-decoder model; "
            "context parallelism supports a single stack of layers. Set cp_size=1."
        )
    # A pipeline removes layers later.
    layers = find_layers(model, state.spec, "cp_size")
    full_sequence_blocks = find_full_sequence_blocks(model, state.spec, layers)
    state.placed[NAME] = layers, full_sequence_blocks


def install(model: Any, state: ParallelState) -> None:
    """Installs the split before the first layer, and the gather after the last one or, with labels, after the loss."""
    ranks = state.axes.size(NAME)
    if ranks == 1:
        return
    name, full_sequence_blocks = state.placed[NAME]
    group = state.mesh.group(NAME)
    # cp ranks start each forward from the same RNG state; layers then draw per rank.
    SyncedRngState(state.mesh.device, state.mesh.host_group(NAME)).install(state.hooks)
    layers: Any = model.get_submodule(name)
    arguments = dict.fromkeys((*_ARGUMENTS, *state.spec.sp.per_token_arguments), 1) | dict(state.spec.cp.sequence_dims)
    random = StreamOfPart(state.mesh.device, state.axes.rank(NAME))
    unshardable_arguments = {name for names in state.spec.tp.local_arguments.values() for name in names}
    has_layer_drop = leaves_layers_out(model.config)
    stack = ContextStack(context_groups(state), group, arguments, unshardable_arguments, random, has_layer_drop)
    stack.install(model, layers, state.hooks)
    state.placed[STACK] = stack
    state.full_sequence_fns.append((name, stack.on_full_sequence))
    modules, regions = dict(model.named_modules()), state.placed.get(REGIONS)
    for block in full_sequence_blocks & modules.keys():
        # Blocks that mix tokens outside of attention: each rank computes some heads of the full sequence, or all of it.
        heads = heads_to_share(modules[block], block, state)
        region = regions.uniform.get(block) if regions is not None else None
        # Heads of the block split over cp, or all of it on every rank.
        around = FullSequenceBlock(stack, block, region) if heads is None else SharedHeadBlock(stack, block, heads)
        around.install(modules[block], state.hooks)
    guards = place_head(model, state, stack, name)
    leaving = state.leaving

    def leave_stage(hidden: Tensor, layers: str) -> Tensor:
        return stack.leave_stage(hidden if leaving is None else leaving(hidden, layers))

    state.leaving = leave_stage
    # Sequence parallelism splits a rank's tokens further: gather over tp first, then over cp.
    within = state.loss.join_tokens
    state.loss.join_tokens = lambda part: stack.gather_token_outputs(within(part))
    OutputChecks(
        {
            "output_attentions": "each rank has only the attention maps of its tokens. Load the model without "
            "megatron_config.",
            "output_hidden_states": "between layers each rank has only its tokens. Set cp_size=1.",
        }
    ).install(state.hooks)
    guards.install(model, state.hooks)
    state.placed.setdefault(GUARDS, []).append(guards)


def context_groups(state: ParallelState) -> ContextGroups:
    """Returns the process groups of a model's `cp_comm_type`; collective."""
    mesh, scheme = state.mesh, state.config.cp_comm_type
    everyone = mesh.group(NAME)
    if scheme == "a2a":
        return ContextGroups(heads=everyone, cp_group=everyone)
    # Inner groups of neighbors exchange heads; outer groups are the rings.
    if scheme == "a2a+p2p":
        return ContextGroups(mesh.group("cp_inner"), mesh.group("cp_outer"), cp_group=everyone)
    return ContextGroups(None, everyone, gathers=scheme == "all_gather", cp_group=everyone)


def place_head(model: Any, state: ParallelState, stack: ContextStack, layers: str) -> UserHookChecks:
    """Sets up a linear head to compute the loss of each rank's tokens only; other heads get full sequences.

    With tensor parallelism the head may be vocab-parallel already. Returns the checks of user hooks.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, VocabParallelHead):
        if state.axes.size("tp") > 1 or not is_plain_head(head):
            return UserHookChecks(model, layers)
        # A head without tp becomes lazy too, so that its loss can be computed from local tokens.
        make_lazy(head, model, state)
    head.part_of = stack.part_of
    guards = UserHookChecks(model, layers)
    if not reshapes_to_inputs(type(model.base_model)) and not stack.has_layer_drop:
        stack.keeps_tokens = lambda: head.loss_is_pending and guards.tail_is_stock and not stack.keeps_some_logits
    return guards

"""The vocabulary head of a model whose rows are shared out: each rank takes the loss of some tokens."""

from typing import Any

from torch import nn

from ..compat.transformers_models import reshapes_to_inputs
from ..parallel_state import ParallelState
from ..tensor_parallel.local_parameters import ActiveForwards, swap_class
from ..tensor_parallel.loss_mode import install_pending_loss
from ..tensor_parallel.vocab_parallel_head import VocabParallelHead
from .sequence_split import ContextStack
from .user_hook_checks import UserHookChecks


def place_head(model: Any, state: ParallelState, stack: ContextStack, layers: str) -> UserHookChecks:
    """Has a linear head compute its loss from the tokens of each rank; others get whole rows.

    With tensor parallelism it may be a vocab-parallel one already. Returns what looks for users' functions.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, VocabParallelHead):
        is_plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        if state.axes.size("tp") > 1 or not is_plain:
            return UserHookChecks(model, layers)
        swap_class(head, VocabParallelHead)
        head.mesh, head.forwards = state.mesh, ActiveForwards()
        head.loss_chunk_size = state.config.loss_chunk_size
        install_pending_loss(model, state)
    head.part_of = stack.part_of
    guards = UserHookChecks(model, layers)
    if not reshapes_to_inputs(type(model.base_model)):
        stack.keeps_tokens = lambda: head.loss_is_pending and guards.tail_is_stock and not stack.keeps_some_logits
    return guards

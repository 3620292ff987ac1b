"""Output head over one rank: `loss_chunk_size` without tensor parallelism, and losses of a rank's own tokens with cp.

The head becomes a vocabulary-parallel head whose only rank owns the full vocabulary, so that the loss is computed from
its input in chunks of tokens.
"""

from typing import Any

from torch import nn

from ..core.off_stage import computes_here
from ..errors import UnsupportedError
from ..models.spec import module_name
from ..parallel_state import ParallelState
from .local_parameters import ActiveForwards, swap_class
from .loss_mode import install_pending_loss
from .vocab_parallel_head import VocabParallelHead


def is_plain_head(head: Any) -> bool:
    """Returns whether a head computes what `nn.Linear` does."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def chunks_loss(state: ParallelState) -> bool:
    """Returns whether `loss_chunk_size` needs a head that neither tensor nor context parallelism installs."""
    return state.config.loss_chunk_size is not None and state.axes.size("tp") == state.axes.size("cp") == 1


def require_plain_head(model: Any, state: ParallelState) -> None:
    """Raises `UnsupportedError` if `loss_chunk_size` is set for a head whose logits cannot be computed in chunks."""
    head = model.get_output_embeddings()
    if head is None or not chunks_loss(state) or is_plain_head(head):
        return
    raise UnsupportedError(
        f"MegatronConfig.loss_chunk_size = {state.config.loss_chunk_size}: {module_name(model, head)} is a "
        f"{type(head).__name__}, and only the logits of nn.Linear can be computed in chunks. Load the model "
        "without loss_chunk_size."
    )


def install_unsharded_head(model: Any, state: ParallelState) -> None:
    """Makes a loaded model compute its loss in chunks of tokens; does nothing on pipeline stages without the head."""
    head = model.get_output_embeddings()
    if head is not None and computes_here(head) and is_plain_head(head):
        make_lazy(head, model, state)


def make_lazy(head: nn.Module, model: Any, state: ParallelState) -> None:
    """Turns a linear head into one whose logits are computed by the loss, or when they are read."""
    swap_class(head, VocabParallelHead)
    assert isinstance(head, VocabParallelHead)
    head.mesh, head.forwards = state.mesh, ActiveForwards()
    head.loss_chunk_size = state.config.loss_chunk_size
    install_pending_loss(model, state)

"""What TRL's trainers compute of a batch beside the model, over the rows of all dp ranks.

A mean that a trainer takes itself is that of this rank's rows. It is the batch's once averaged where every rank has as
many terms, which holds for rows and not for tokens, for padding, and for what rows are paired within.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..loss import IGNORE_INDEX, scalar
from ..parallel_state import ParallelState, parallel_state
from .trl import data_parallel_size, layout_of_policy


def kto_prepare_dataset(original: Callable, self: Any, dataset: Any, tokenizer: Any, args: Any, name: str) -> Any:
    """Pairs prompts with other completions for KTO's KL term within the batch of all dp ranks, as one process does."""
    dp_size = data_parallel_size(self)
    if dp_size > 1:
        args = copy.copy(args)
        args.per_device_train_batch_size *= dp_size
    return original(self, dataset, tokenizer, args, name)


def orpo_forward(original: Callable, self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Takes ORPO's loss of the chosen texts over all ranks' tokens: of prompts and answers both."""
    if self.is_encoder_decoder:
        return _with_loss_of_all_ranks(original, self, model, batch, batch["chosen_labels"] != IGNORE_INDEX)
    return _with_loss_of_all_ranks(original, self, model, batch, batch["chosen_attention_mask"] == 1)


def cpo_forward(original: Callable, self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Takes CPO's loss of the chosen texts over all ranks' tokens: of answers alone."""
    if not self.cpo_alpha:
        return original(self, model, _padded_alike(self, batch))
    return _with_loss_of_all_ranks(original, self, model, batch, batch["chosen_labels"] != IGNORE_INDEX)


def _with_loss_of_all_ranks(
    original: Callable, trainer: Any, model: Any, batch: Any, counts: Tensor
) -> tuple[Tensor, ...]:
    """Replaces the fifth output, this rank's mean `()` over the tokens that `counts` `[rows, sequence]`."""
    state = _spread(trainer)
    found = original(trainer, model, _padded_alike(trainer, batch))
    if state is None:
        return found
    # The first token of a text is nobody's target.
    count = (counts if trainer.is_encoder_decoder else counts[:, 1:]).sum().to(found[4].device)
    # The mean of no token is no number, neither is its product with zero.
    total = found[4].nan_to_num() * count
    # Evaluations too: what is gathered for their metrics waits for every rank.
    with state.loss.together():
        return *found[:4], state.loss.mean(total, count), *found[5:]


def _padded_alike(trainer: Any, batch: Any) -> Any:
    """Pads `[rows, sequence]` to the longest text of all ranks: TRL logs the mean of logits over padding too."""
    state = _spread(trainer)
    if state is None or trainer.is_encoder_decoder:
        return batch
    ids = batch["chosen_input_ids"]
    longest = scalar(max(ids.shape[1], batch["rejected_input_ids"].shape[1]), ids.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=state.mesh.group("dp_cp"))
    missing = int(longest) - ids.shape[1]
    fill = {"input_ids": trainer.processing_class.pad_token_id, "attention_mask": 0, "labels": IGNORE_INDEX}
    texts = {f"chosen_{name}": value for name, value in fill.items()}
    return dict(batch) | {name: F.pad(batch[name], (0, missing), value=value) for name, value in texts.items()}


def gkd_init(
    original: Callable,
    self: Any,
    model: Any = None,
    teacher_model: Any = None,
    args: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Loads a teacher that is given by name with the student's layout."""
    layout = layout_of_policy(model, args)
    if layout is None or not isinstance(teacher_model, str):
        return original(self, model, teacher_model, args, *rest, **kwargs)
    given = args.teacher_model_init_kwargs
    # TRL reads the dtype of kwargs that are there.
    args.teacher_model_init_kwargs = {"dtype": None, "megatron_config": layout} | (given or {})
    try:
        original(self, model, teacher_model, args, *rest, **kwargs)
    finally:
        args.teacher_model_init_kwargs = given


def gkd_compute_loss(
    original: Callable, self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Returns GKD's divergence `()` so that the mean over dp ranks divides by all ranks' tokens once."""
    found = original(self, model, inputs, return_outputs, num_items_in_batch)
    state = _spread(self)
    if state is None or num_items_in_batch is None:
        return found
    loss, *outputs = found if return_outputs else (found,)
    loss = loss * state.mesh.dp_size
    return (loss, *outputs) if return_outputs else loss


def _spread(trainer: Any) -> ParallelState | None:
    """Returns the state of a model whose batches lie on several ranks."""
    state = parallel_state(trainer.model)
    return state if state is not None and state.loss.is_spread else None

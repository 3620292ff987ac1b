"""What TRL's trainers compute of a batch beside the model, over the rows of all dp ranks.

A mean that a trainer takes itself is that of this rank's rows. It is the batch's once averaged where every rank has as
many terms, which holds for rows and not for tokens, for padding, and for what rows are paired within.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...losses.targets import IGNORE_INDEX, scalar
from ...parallel_state import ParallelState, parallel_state
from ..trainer.uneven_batches import require_full_batch
from .base import data_parallel_size
from .checks import OVER_THE_BATCH
from .preference_pairs import ROWS_OF_REPLICAS, ReplicaBatches


def kto_prepare_dataset(
    original: Callable, self: Any, dataset: Any, processing_class: Any, args: Any, dataset_name: str
) -> Any:
    """Pairs prompts with other completions for KTO's KL term within the batch of all dp ranks, as one process does."""
    dp_size = data_parallel_size(self)
    if dp_size > 1:
        args = copy.copy(args)
        args.per_device_train_batch_size *= dp_size
    return original(self, dataset, processing_class, args, dataset_name)


def dpo_loss(original: Callable, self: Any, model: Any, inputs: Any, return_outputs: bool) -> Any:
    """Takes losses that sort rows or average over tokens over the rows of all dp ranks, `()`."""
    state = _spread(self)
    if state is None:
        return original(self, model, inputs, return_outputs)
    if not self.model.training:
        require_full_batch(self, inputs, is_evaluated=True)
    # Router losses of evaluations too.
    with state.loss.together():
        if OVER_THE_BATCH.isdisjoint(self.loss_types):
            return original(self, model, inputs, return_outputs)
        loss = _over_the_batch(original, self, model, inputs, state)
    if not return_outputs:
        return loss
    names = inputs.keys() - {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}
    with torch.no_grad():
        return loss, model(**{name: inputs[name] for name in names}, use_cache=False)


def _over_the_batch(original: Callable, trainer: Any, model: Any, inputs: Any, state: ParallelState) -> Tensor:
    rows, tokens = ReplicaBatches(state.mesh.group("dp")), trainer._total_train_tokens
    batch, reference = rows.joined_batch(inputs), trainer.ref_model
    if reference is not None and parallel_state(trainer.accelerator.unwrap_model(reference)) is None:
        trainer.ref_model = rows.of(reference)
    token = ROWS_OF_REPLICAS.set(rows)
    try:
        loss: Tensor = original(trainer, model, batch, False)
    finally:
        ROWS_OF_REPLICAS.reset(token)
        trainer.ref_model = reference
    # TRL adds up what every rank counts.
    trainer._total_train_tokens = tokens + (trainer._total_train_tokens - tokens) // rows.ranks
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode]["num_tokens"] = [trainer._total_train_tokens]
    return loss


def kto_loss(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the router losses of evaluations over all replicas."""
    state = _spread(self)
    with nullcontext() if state is None else state.loss.together():
        return original(self, *args, **kwargs)


def orpo_forward(original: Callable, self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Takes ORPO's loss of the chosen texts over all ranks' tokens: of prompts and answers both."""
    if self.is_encoder_decoder:
        return _with_loss_of_all_ranks(original, self, model, batch, batch["chosen_labels"] != IGNORE_INDEX)
    return _with_loss_of_all_ranks(original, self, model, batch, batch["chosen_attention_mask"] == 1)


def cpo_forward(original: Callable, self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Takes CPO's loss of the chosen texts over all ranks' tokens: of answers alone."""
    if not self.cpo_alpha:
        return original(self, model, _padded_identically(self, batch))
    return _with_loss_of_all_ranks(original, self, model, batch, batch["chosen_labels"] != IGNORE_INDEX)


def _with_loss_of_all_ranks(
    original: Callable, trainer: Any, model: Any, batch: Any, counts: Tensor
) -> tuple[Tensor, ...]:
    """Replaces the fifth output, this rank's mean `()` over the tokens that `counts` `[rows, sequence]`."""
    state = _spread(trainer)
    found = original(trainer, model, _padded_identically(trainer, batch))
    if state is None:
        return found
    # The first token of a text is nobody's target.
    count = (counts if trainer.is_encoder_decoder else counts[:, 1:]).sum().to(found[4].device)
    # The mean of no token is no number, neither is its product with zero.
    total = found[4].nan_to_num() * count
    # Evaluations too: what is gathered for their metrics waits for every rank.
    with state.loss.together():
        return *found[:4], state.loss.mean(total, count), *found[5:]


def _padded_identically(trainer: Any, batch: Any) -> Any:
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


def _spread(trainer: Any) -> ParallelState | None:
    """Returns the state of a model whose batches lie on several ranks."""
    state = parallel_state(trainer.model)
    return state if state is not None and state.loss.has_data_parallel else None

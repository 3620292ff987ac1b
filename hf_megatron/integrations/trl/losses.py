"""Losses and metrics that TRL's trainers compute outside the model, over the samples of all dp ranks.

A mean taken by the trainer covers the local samples only. Averaged over dp it equals the global mean if every rank has
the same number of terms. That holds for samples, but not for tokens, padding or pairs within a batch.
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
    """Pairs prompts with other completions for KTO's KL term within the global batch, as a single process does."""
    dp_size = data_parallel_size(self)
    if dp_size > 1:
        args = copy.copy(args)
        args.per_device_train_batch_size *= dp_size
    return original(self, dataset, processing_class, args, dataset_name)


def dpo_loss(original: Callable, self: Any, model: Any, inputs: Any, return_outputs: bool) -> Any:
    """Computes DPO losses `()` that sort samples or average over tokens on the samples of all dp ranks."""
    state = _spread(self)
    if state is None:
        return original(self, model, inputs, return_outputs)
    if not self.model.training:
        require_full_batch(self, inputs, is_evaluated=True)
    # Evaluations need it too, for the router loss.
    with state.loss.normalizing_over_ranks():
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
    # Every rank has counted the global batch, but TRL sums over the ranks: keep this rank's share.
    trainer._total_train_tokens = tokens + (trainer._total_train_tokens - tokens) // rows.ranks
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode]["num_tokens"] = [trainer._total_train_tokens]
    return loss


def kto_loss(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes KTO's loss, with the router loss of evaluations over all replicas."""
    state = _spread(self)
    with nullcontext() if state is None else state.loss.normalizing_over_ranks():
        return original(self, *args, **kwargs)


def orpo_forward(original: Callable, self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Computes ORPO's loss on chosen texts over all ranks' tokens, prompt and answer."""
    if self.is_encoder_decoder:
        return _replace_token_mean(original, self, model, batch, batch["chosen_labels"] != IGNORE_INDEX)
    return _replace_token_mean(original, self, model, batch, batch["chosen_attention_mask"] == 1)


def cpo_forward(original: Callable, self: Any, model: Any, batch: Any) -> tuple[Tensor, ...]:
    """Computes CPO's loss on chosen texts over all ranks' tokens, answers only."""
    if not self.cpo_alpha:
        return original(self, model, _padded_identically(self, batch))
    return _replace_token_mean(original, self, model, batch, batch["chosen_labels"] != IGNORE_INDEX)


def _replace_token_mean(original: Callable, trainer: Any, model: Any, batch: Any, counts: Tensor) -> tuple[Tensor, ...]:
    """Replaces the fifth output, the local mean `()` over tokens where `counts` `[batch, sequence]` is true."""
    state = _spread(trainer)
    outputs = original(trainer, model, _padded_identically(trainer, batch))
    if state is None:
        return outputs
    # The first token of a text is not a target.
    count = (counts if trainer.is_encoder_decoder else counts[:, 1:]).sum().to(outputs[4].device)
    # The mean over zero tokens is NaN, and so is its product with zero.
    total = outputs[4].nan_to_num() * count
    # Evaluations take part as well: gathering their metrics is collective.
    with state.loss.normalizing_over_ranks():
        return *outputs[:4], state.loss.mean(total, count), *outputs[5:]


def _padded_identically(trainer: Any, batch: Any) -> Any:
    """Pads `[batch, sequence]` to the longest text of all ranks, because TRL logs mean logits including padding."""
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
    """Returns the state of a model with data parallelism, otherwise `None`."""
    state = parallel_state(trainer.model)
    return state if state is not None and state.loss.has_data_parallel else None

"""Losses outside the model: per-token numbers of its last stage on every rank, in place of its logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .loss import IGNORE_INDEX, next_tokens
from .parallel_state import parallel_state
from .tensor_parallel.vocab_log_probs import LOG_PROBS, deferring, token_scores
from .tensor_parallel.vocabulary import require_tokens


def scores_of_call(
    model: Any, call: Callable[[Callable[[Any], tuple[Tensor, ...]]], Any], targets: Tensor, wanted: Sequence[str]
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns what is wanted of the logits of one call, `[batch, sequence]` each, and its router loss if any.

    Args:
        call (`Callable`): calls the model without labels and applies its argument to what the model returns; a model
            in a pipeline does that itself.
        targets (`Tensor`): `[batch, sequence]`, as `next_tokens` makes them.
        wanted: names of `token_scores.FIELDS`.
    """
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline

    def read(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        part = targets[rows]
        values = token_scores(output["logits"], part, wanted)
        head = model.get_output_embeddings()
        if state is not None and state.shards_weights and pipeline is not None and torch.is_grad_enabled():
            # The head is a unit of its own, and FSDP2 has not seen it return these.
            for value in values:
                if value.requires_grad:
                    value.register_hook(lambda gradient: head.unshard())
        aux_loss = output.get("aux_loss")
        return values if aux_loss is None else (*values, aux_loss * (len(part) / len(targets)))

    if pipeline is not None:
        # The last stage alone would notice, with the others waiting for it.
        require_tokens(targets, model.config.get_text_config().vocab_size, "label", IGNORE_INDEX)
    with deferring(model):
        if pipeline is None:
            values = call(read)
        else:
            with pipeline.reading(read):
                values = call(lambda output: output)
    return values[: len(wanted)], values[len(wanted)] if len(values) > len(wanted) else None


def token_log_probs(model: Any, labels: Tensor, **batch: Any) -> Tensor:
    """Computes the log-probability of every label, for losses that are computed outside the model.

    The same on every rank that shares the batch, and differentiable. No rank ever has the logits of more than a chunk
    of tokens, and between the stages of a pipeline only these numbers travel.

    Args:
        model (`PreTrainedModel`): a causal language model, laid out by hf_megatron or not.
        labels (`Tensor`): `[batch, sequence]`, as a model takes them; -100 for tokens that do not count. Labels that do
            not fit the logits, as with `logits_to_keep`, raise `ConfigError`.
        batch: what the model is called with, labels aside.

    Returns:
        `Tensor`: `[batch, sequence - 1]` in fp32; entry `i` belongs to label `i + 1` and is 0 where that is -100.
    """

    def call(read: Callable[[Any], tuple[Tensor, ...]]) -> Any:
        # Before the hooks that hand out full logits and those that wait for the gradient of what the model returns.
        hook = model.register_forward_hook(lambda module, args, output: read(output), prepend=True)
        try:
            return model(**batch, use_cache=False, return_dict=True)
        finally:
            hook.remove()

    (log_probs,), _ = scores_of_call(model, call, next_tokens(labels), (LOG_PROBS,))
    return log_probs[:, :-1]

"""Losses outside the model: per-token numbers of its last stage on every rank, in place of its logits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..losses.targets import IGNORE_INDEX, next_tokens
from ..parallel_state import parallel_state, unwrap_parallel_model
from .sampling import PLAIN, Sampling
from .vocab_log_probs import LOG_PROBS, deferring, token_scores
from .vocab_range import require_tokens

Call = Callable[[Callable[[Any], tuple[Tensor, ...]]], Any]


def read_of_call(model: Any, call: Call, read: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns what `read` makes of the output of a call, whose logits are `DeferredLogits`, on every rank.

    Args:
        call (`Callable`): calls the model without labels and applies its argument to what the model returns; a model
            in a pipeline does that itself.
        read (`Callable`): takes an output, and of a pipeline the rows that it is of; tensors `[rows, ...]`.
    """
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline
    with deferring(model):
        if pipeline is None:
            values: tuple[Tensor, ...] = call(read)
            return values
        with pipeline.reading(read):
            values = call(lambda output: output)
        return values


def hooked_call(model: Any, **batch: Any) -> Call:
    """Makes the call of a model, with a batch, that `read_of_call` and `scores_of_call` take."""

    def call(read: Callable[[Any], tuple[Tensor, ...]]) -> Any:
        # Before the hooks that hand out full logits and those that wait for the gradient of what the model returns.
        # They are inside of an adapter's wrapper.
        hook = unwrap_parallel_model(model).register_forward_hook(
            lambda module, args, output: read(output), prepend=True
        )
        try:
            return model(**batch, use_cache=False, return_dict=True)
        finally:
            hook.remove()

    return call


def scores_of_call(
    model: Any,
    call: Call,
    targets: Tensor,
    wanted: Sequence[str],
    sampling: Sampling = PLAIN,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns what is wanted of the logits of one call, `[batch, sequence]` each, and its router loss if any.

    Args:
        call (`Callable`): calls the model without labels and applies its argument to what the model returns; a model
            in a pipeline does that itself.
        targets (`Tensor`): `[batch, sequence]`, as `next_tokens` makes them.
        wanted: names of `token_scores.FIELDS`.
        sampling (`Sampling`): of what distribution.
    """
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline

    def read(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        part = targets[rows]
        values = token_scores(output["logits"], part, wanted, sampling)
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
    values = read_of_call(model, call, read)
    return values[: len(wanted)], values[len(wanted)] if len(values) > len(wanted) else None


class TokenStatistics(NamedTuple):
    """What a model makes of every label, `[batch, sequence - 1]` each in fp32; 0 where a label is -100.

    Attributes:
        log_probs: of the labels.
        entropies: of what the model expects there, in nats.
    """

    log_probs: Tensor
    entropies: Tensor


def token_log_probs(
    model: Any,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    **batch: Any,
) -> Tensor:
    """Computes the log-probability of every label, for losses that are computed outside the model.

    The same on every rank that shares the batch, and differentiable. No rank ever has the logits of more than a chunk
    of tokens, and between the stages of a pipeline only these numbers travel.

    Args:
        model (`PreTrainedModel`): a causal language model, laid out by hf_megatron or not.
        labels (`Tensor`): `[batch, sequence]`, as a model takes them; -100 for tokens that do not count. Labels that do
            not fit the logits, as with `logits_to_keep`, raise `ConfigError`.
        temperature (`float`, defaults to 1): what logits are divided by.
        top_k (`int`, *optional*): only the likeliest tokens can be drawn, so many and those as likely as the last. Of
            a label that cannot be drawn the log-probability is `-inf`, without gradient.
        top_p (`float`, *optional*): only the likeliest tokens can be drawn, as many as have this probability together.
        batch: what the model is called with, labels aside.

    Returns:
        `Tensor`: `[batch, sequence - 1]` in fp32; entry `i` belongs to label `i + 1` and is 0 where that is -100.

    Raises:
        ConfigError: numbers out of range, or labels that do not fit.
    """
    sampling = Sampling(temperature, top_k, top_p)
    targets = next_tokens(labels)
    (log_probs,), _ = scores_of_call(model, hooked_call(model, **batch), targets, (LOG_PROBS,), sampling)
    return log_probs[:, :-1]


def token_statistics(
    model: Any,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    **batch: Any,
) -> TokenStatistics:
    """Computes log-probabilities and entropies of one call, both differentiable, as `token_log_probs` does.

    Args:
        model, labels, temperature, top_k, top_p, batch: as of `token_log_probs`.

    Returns:
        `TokenStatistics`: `[batch, sequence - 1]` each.
    """
    sampling, wanted = Sampling(temperature, top_k, top_p), (LOG_PROBS, "entropy")
    found, _ = scores_of_call(model, hooked_call(model, **batch), next_tokens(labels), wanted, sampling)
    return TokenStatistics(*(value[:, :-1] for value in found))

"""Losses outside the model: per-token values from the last stage on every rank, instead of logits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.torch_autograd import called_module
from ..losses.targets import IGNORE_INDEX, next_tokens
from ..parallel_state import parallel_state, unwrap_parallel_model
from .sampling import PLAIN, Sampling
from .vocab_log_probs import LOG_PROBS, deferring, token_scores
from .vocab_range import require_tokens

Call = Callable[[Callable[[Any], tuple[Tensor, ...]]], Any]


def read_call(model: Any, call: Call, read: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns `read` of the output of a call, whose logits are `DeferredLogits`, on every rank.

    Args:
        call (`Callable`): calls the model without labels and applies its argument to the output; with a pipeline the
            model applies it itself.
        read (`Callable`): takes an output, and in a pipeline the slice of the batch it belongs to; returns tensors
            `[samples, ...]`.
    """
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline
    with deferring(model):
        if pipeline is None:
            values: tuple[Tensor, ...] = call(read)
            return values
        # The last stage applies `read` to each microbatch; the results are sent to all stages.
        with pipeline.reading(read):
            values = call(lambda output: output)
        return values


def hooked_call(model: Any, **batch: Any) -> Call:
    """Returns the call of a model with a batch, as `read_call` and `compute_scores` take it."""

    def call(read: Callable[[Any], tuple[Tensor, ...]]) -> Any:
        # Prepended, so that it runs before the hooks that gather full logits or capture the gradient of the outputs.
        # Those are on the model inside an adapter's wrapper.
        hook = unwrap_parallel_model(model).register_forward_hook(
            lambda module, args, output: read(output), prepend=True
        )
        try:
            return model(**batch, use_cache=False, return_dict=True)
        finally:
            hook.remove()

    return call


def compute_scores(
    model: Any,
    call: Call,
    targets: Tensor,
    field_names: Sequence[str],
    sampling: Sampling = PLAIN,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns the wanted fields of one call's logits, `[batch, sequence]` each, and its router loss if there is one.

    Args:
        call (`Callable`): calls the model without labels and applies its argument to the output; with a pipeline the
            model applies it itself.
        targets (`Tensor`): `[batch, sequence]`, as returned by `next_tokens`.
        field_names: names of `vocab_log_probs.FIELDS`.
        sampling (`Sampling`): distribution of the scores.
    """
    state = parallel_state(model)
    pipeline = None if state is None else state.pipeline

    def read(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        # `rows` is the microbatch of a pipeline: [samples, sequence] of [batch, sequence].
        part = targets[rows]
        values = token_scores(output["logits"], part, field_names, sampling)
        head = called_module(model.get_output_embeddings())
        if state is not None and state.shards_weights and pipeline is not None and torch.is_grad_enabled():
            # The head is a separate FSDP2 unit whose hooks did not see these outputs: unshard it for backward.
            for value in values:
                if value.requires_grad:
                    value.register_hook(lambda gradient: head.unshard())
        aux_loss = output.get("aux_loss")
        return values if aux_loss is None else (*values, aux_loss * (len(part) / len(targets)))

    if pipeline is not None:
        # Checked on all stages: an error on the last stage alone would leave the others blocked.
        require_tokens(targets, model.config.get_text_config().vocab_size, "label", IGNORE_INDEX)
    values = read_call(model, call, read)
    return values[: len(field_names)], values[len(field_names)] if len(values) > len(field_names) else None


class TokenStatistics(NamedTuple):
    """Per-token statistics of the labels, `[batch, sequence - 1]` each in fp32; 0 where a label is -100.

    Attributes:
        log_probs: log-probabilities of the labels.
        entropies: entropies of the predicted distributions, in nats.
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

    The result is identical on every rank of a model-parallel group, and differentiable. No rank ever has the logits of
    more than a chunk of tokens, and pipeline stages exchange only these values.

    Args:
        model (`PreTrainedModel`): a causal language model, parallelized by hf_megatron or not.
        labels (`Tensor`): `[batch, sequence]`, as a model takes them; -100 for tokens that do not count. Labels that do
            not fit the logits, as with `logits_to_keep`, raise `ConfigError`.
        temperature (`float`, defaults to 1): divisor of the logits.
        top_k (`int`, *optional*): sample from the k most likely tokens only, and any as likely as the last of them. A
            label outside of them has the log-probability `-inf`, without gradient.
        top_p (`float`, *optional*): sample from the most likely tokens only, as many as reach this total probability.
        batch: arguments of the model's call, except labels.

    Returns:
        `Tensor`: `[batch, sequence - 1]` in fp32; entry `i` belongs to label `i + 1` and is 0 where that is -100.

    Raises:
        ConfigError: values out of range, or labels that do not fit.
    """
    sampling = Sampling(temperature, top_k, top_p)
    targets = next_tokens(labels)
    (log_probs,), _ = compute_scores(model, hooked_call(model, **batch), targets, (LOG_PROBS,), sampling)
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
        model, labels, temperature, top_k, top_p, batch: as in `token_log_probs`.

    Returns:
        `TokenStatistics`: `[batch, sequence - 1]` each.
    """
    sampling, field_names = Sampling(temperature, top_k, top_p), (LOG_PROBS, "entropy")
    scores, _ = compute_scores(model, hooked_call(model, **batch), next_tokens(labels), field_names, sampling)
    return TokenStatistics(*(value[:, :-1] for value in scores))

"""Distillation: per-token divergence of a student from a teacher, without the full logits of either."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compat.torch_autograd import called_module
from ..errors import ConfigError, UnsupportedError
from ..losses.targets import IGNORE_INDEX, next_tokens
from ..parallel_state import parallel_state
from .local_parameters import local_view, weight_in_use
from .token_log_probs import Call, hooked_call, read_call
from .vocab_divergence import Teacher, divergences
from .vocab_log_probs import DeferredLogits
from .vocab_range import require_tokens


def compute_divergences(
    student: Any, call: Call, teacher: Any, ask: Call, targets: Tensor, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns the divergence of one call of a student and its entropy, `[batch, sequence]` each, on every rank.

    Args:
        call, ask: call the student, and the teacher with the same tokens, as `read_call` takes them.
        targets (`Tensor`): `[batch, sequence]`, as returned by `next_tokens`.
        beta (`float`): from 0, forward divergence, to 1, reverse.
        temperature (`float`): divisor of both models' logits.

    Raises:
        ConfigError: different vocabularies, or values out of range.
        UnsupportedError: a head that is not linear, or a teacher whose vocabulary is split differently.
    """
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ConfigError(f"beta = {beta}, temperature = {temperature}: expected 0 <= beta <= 1 and temperature > 0.")
    _require_same_vocabulary_split(student, teacher)
    last: list[DeferredLogits] = []

    def read_teacher(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        logits = _deferred(output, teacher)
        # The last hidden states suffice; the logits object keeps the head, dtype and transform.
        last[:] = [logits]
        hidden = logits.hidden.detach()
        # [batch, local tokens, hidden] -> [batch, sequence, hidden] if ranks hold different tokens.
        return (hidden if logits.tokens is None else logits.tokens.join(hidden),)

    # [batch, sequence, hidden], on every rank; with a pipeline sent from the last stage.
    with torch.no_grad():
        (hidden,) = read_call(teacher, ask, read_teacher)
    state = parallel_state(student)
    pipeline = None if state is None else state.pipeline
    if pipeline is not None:
        require_tokens(targets, student.config.get_text_config().vocab_size, "label", IGNORE_INDEX)

    full_lm_head: Callable[[], AbstractContextManager[None]] = functools.partial(_full_lm_head, teacher)
    copy: Any = None
    if pipeline is not None and _is_split_with_pipeline(teacher):
        # Only the last stage reads the head, but unsharding it is collective over all ranks: copy it beforehand.
        with full_lm_head(), torch.no_grad():
            head = last[0].head
            bias = local_view(head.bias)
            copy = weight_in_use(head).clone(), None if bias is None else bias.clone()
        full_lm_head = nullcontext

    def read_student(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        logits = _deferred(output, student)
        # `rows` is the microbatch of a pipeline: a slice of the batch dim.
        of_teacher = Teacher(hidden[rows].to(logits.device), last[0], full_lm_head, copy)
        values = divergences(logits, of_teacher, targets[rows].to(logits.device), beta, temperature)
        if state is not None and state.shards_weights and pipeline is not None and values[0].requires_grad:
            # The head is a separate FSDP2 unit whose hooks did not see these outputs: unshard it for backward.
            values[0].register_hook(lambda gradient: called_module(student.get_output_embeddings()).unshard())
        return values

    divergence, entropy = read_call(student, call, read_student)
    return divergence, entropy


def _require_same_vocabulary_split(student: Any, teacher: Any) -> None:
    """Raises `UnsupportedError` if a rank would need vocabulary entries of the teacher's head that it does not have."""

    def split(model: Any) -> str:
        state = parallel_state(model)
        tp_size, pp_size = (1, 1) if state is None else (state.config.tp_size, state.config.pp_size)
        # The rank of the last stage depends on the schedule.
        schedule = (
            f", pipeline_schedule={state.config.pipeline_schedule!r}" if state is not None and pp_size > 1 else ""
        )
        return f"tp_size={tp_size}, pp_size={pp_size}{schedule}"

    of_student, of_teacher = split(student), split(teacher)
    if of_teacher not in ("tp_size=1, pp_size=1", of_student):
        raise UnsupportedError(
            f"The student has {of_student}, the teacher {of_teacher}: their divergence needs the same vocabulary "
            "sharding. Parallelize the teacher like the student, or with tp_size=1 and pp_size=1."
        )


def _is_split_with_pipeline(model: Any) -> bool:
    state = parallel_state(model)
    return state is not None and state.shards_weights and state.cut is None


@contextmanager
def _full_lm_head(model: Any) -> Iterator[None]:
    """Gathers the output embedding inside the context, if ZeRO-3 shards it."""
    state, head = parallel_state(model), called_module(model.get_output_embeddings())
    if state is None or not state.shards_weights:
        yield
    elif state.cut is None:
        assert state.data_parallel is not None
        with state.data_parallel.full_root():
            yield
    else:
        head.unshard()
        try:
            yield
        finally:
            head.reshard()


def _deferred(output: Any, model: Any) -> DeferredLogits:
    logits = output["logits"]
    if not isinstance(logits, DeferredLogits):
        raise UnsupportedError(
            f"{type(model).__name__} has no linear LM head; divergences are computed from its input hidden states."
        )
    return logits


def token_kl_divergences(
    student: Any, teacher: Any, labels: Tensor, beta: float = 0.5, temperature: float = 1.0, **batch: Any
) -> Tensor:
    """Computes the divergence between a student's and a teacher's predictions at every label, for distillation.

    The result is identical on every rank of a model-parallel group, and differentiable with respect to the student's
    parameters. No rank ever has the logits of more than a chunk of tokens, and only for its shard of the vocabulary;
    pipeline stages exchange only hidden states and these values.

    Args:
        student (`PreTrainedModel`): a causal language model, parallelized by hf_megatron or not.
        teacher (`PreTrainedModel`): with the same vocabulary, parallelized like the student or with `tp_size=1` and
            `pp_size=1`; it is called without gradients.
        labels (`Tensor`): `[batch, sequence]`, as a model takes them; -100 for tokens that do not count.
        beta (`float`, defaults to 0.5): 0 is KL(teacher || student), 1 KL(student || teacher), in between the
            generalized Jensen-Shannon divergence (Agarwal et al., 2023).
        temperature (`float`, defaults to 1): divisor of both models' logits.
        batch: arguments of both models' calls, except labels.

    Returns:
        `Tensor`: `[batch, sequence - 1]` in fp32; entry `i` belongs to label `i + 1` and is 0 where that is -100.

    Raises:
        ConfigError: different vocabularies, or values out of range.
        UnsupportedError: a head that is not linear, or a teacher whose vocabulary is split differently.
    """
    divergence, _ = compute_divergences(
        student,
        hooked_call(student, **batch),
        teacher,
        hooked_call(teacher, **batch),
        next_tokens(labels),
        beta,
        temperature,
    )
    return divergence[:, :-1]

"""Distillation: the divergence of a student from a teacher per token, without the full logits of either."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedError
from ..losses.targets import IGNORE_INDEX, next_tokens
from ..parallel_state import parallel_state
from .local_parameters import local_view
from .token_log_probs import Call, hooked_call, read_of_call
from .vocab_divergence import Teacher, divergences
from .vocab_log_probs import DeferredLogits
from .vocab_range import require_tokens


def divergences_of_calls(
    student: Any, call: Call, teacher: Any, ask: Call, targets: Tensor, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Returns the divergence of one call of a student and its entropy, `[batch, sequence]` each, on every rank.

    Args:
        call, ask: call the student, and the teacher with the same tokens, as `read_of_call` says.
        targets (`Tensor`): `[batch, sequence]`, as `next_tokens` makes them.
        beta (`float`): 0, forward divergence, to 1, reverse.
        temperature (`float`): what the logits of both are divided by.

    Raises:
        ConfigError: other vocabularies, or numbers out of range.
        UnsupportedError: a head that is no linear, or a teacher whose vocabulary is split otherwise.
    """
    if not 0 <= beta <= 1 or temperature <= 0:
        raise ConfigError(f"beta = {beta}, temperature = {temperature}: expected 0 to 1, and more than 0.")
    _require_same_vocabulary_split(student, teacher)
    last: list[DeferredLogits] = []

    def read_teacher(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        logits = _deferred(output, teacher)
        last[:] = [logits]
        hidden = logits.hidden.detach()
        return (hidden if logits.tokens is None else logits.tokens.join(hidden),)

    with torch.no_grad():
        (hidden,) = read_of_call(teacher, ask, read_teacher)
    state = parallel_state(student)
    pipeline = None if state is None else state.pipeline
    if pipeline is not None:
        require_tokens(targets, student.config.get_text_config().vocab_size, "label", IGNORE_INDEX)

    full_lm_head: Callable[[], AbstractContextManager[None]] = functools.partial(_full_lm_head, teacher)
    copy: Any = None
    if pipeline is not None and _is_split_with_pipeline(teacher):
        # The last stage alone reads it, and all ranks hold parts.
        with full_lm_head(), torch.no_grad():
            head = last[0].head
            copy = tuple(None if part is None else part.clone() for part in map(local_view, (head.weight, head.bias)))
        full_lm_head = nullcontext

    def read_student(output: Any, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        logits = _deferred(output, student)
        of_teacher = Teacher(hidden[rows].to(logits.device), last[0], full_lm_head, copy)
        values = divergences(logits, of_teacher, targets[rows].to(logits.device), beta, temperature)
        if state is not None and state.shards_weights and pipeline is not None and values[0].requires_grad:
            # The head is a unit of its own, and FSDP2 has not seen it return these.
            values[0].register_hook(lambda gradient: student.get_output_embeddings().unshard())
        return values

    divergence, entropy = read_of_call(student, call, read_student)
    return divergence, entropy


def _require_same_vocabulary_split(student: Any, teacher: Any) -> None:
    """Raises `UnsupportedError` where a rank would read rows of the teacher's head that it does not have."""

    def split(model: Any) -> str:
        state = parallel_state(model)
        tp_size, pp_size = (1, 1) if state is None else (state.config.tp_size, state.config.pp_size)
        # Schedules have the last stage on other ranks than each other.
        schedule = (
            f", pipeline_schedule={state.config.pipeline_schedule!r}" if state is not None and pp_size > 1 else ""
        )
        return f"tp_size={tp_size}, pp_size={pp_size}{schedule}"

    of_student, of_teacher = split(student), split(teacher)
    if of_teacher not in ("tp_size=1, pp_size=1", of_student):
        raise UnsupportedError(
            f"A divergence of a student with {of_student} from a teacher with {of_teacher}: lay the teacher out as the "
            "student, or with tp_size=1 and pp_size=1."
        )


def _is_split_with_pipeline(model: Any) -> bool:
    state = parallel_state(model)
    return state is not None and state.shards_weights and state.cut is None


@contextmanager
def _full_lm_head(model: Any) -> Iterator[None]:
    """Puts the output embedding together where ZeRO 3 splits it."""
    state, head = parallel_state(model), model.get_output_embeddings()
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
            f"{type(model).__name__}: a divergence reads the hidden states of heads that are linear."
        )
    return logits


def token_kl_divergences(
    student: Any, teacher: Any, labels: Tensor, beta: float = 0.5, temperature: float = 1.0, **batch: Any
) -> Tensor:
    """Computes the divergence between what a student and a teacher expect at every label, for distillation.

    The same on every rank that shares the batch, and differentiable by the student's parameters. No rank ever has the
    logits of more than a chunk of tokens, and of its own part of the vocabulary; between the stages of a pipeline only
    hidden states and these numbers travel.

    Args:
        student (`PreTrainedModel`): a causal language model, laid out by hf_megatron or not.
        teacher (`PreTrainedModel`): with the same vocabulary, laid out as the student, or with `tp_size=1` and
            `pp_size=1`; it is called without gradients.
        labels (`Tensor`): `[batch, sequence]`, as a model takes them; -100 for tokens that do not count.
        beta (`float`, defaults to 0.5): 0 is KL(teacher || student), 1 KL(student || teacher), in between the
            generalised Jensen-Shannon divergence (Agarwal et al., 2023).
        temperature (`float`, defaults to 1): what the logits of both are divided by.
        batch: what both models are called with, labels aside.

    Returns:
        `Tensor`: `[batch, sequence - 1]` in fp32; entry `i` belongs to label `i + 1` and is 0 where that is -100.

    Raises:
        ConfigError: other vocabularies, or numbers out of range.
        UnsupportedError: a head that is no linear, or a teacher whose vocabulary is split otherwise.
    """
    found, _ = divergences_of_calls(
        student,
        hooked_call(student, **batch),
        teacher,
        hooked_call(teacher, **batch),
        next_tokens(labels),
        beta,
        temperature,
    )
    return found[:, :-1]

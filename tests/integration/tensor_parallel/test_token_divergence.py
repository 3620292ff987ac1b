"""Tests of the student-teacher divergence over sharded vocabularies, against single-process full logits."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_megatron import ConfigError, UnsupportedError, token_kl_divergences
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.tensor_parallel import vocab_divergence
from hf_megatron.testing.measure import Measurement, _full, _gradients
from hf_megatron.testing.tolerances import gradient_errors
from tests.helpers.dp_training import count_ranks
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.integration.integrations.trl.test_base import layout


@functools.lru_cache(maxsize=2)
def tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), batch_size=5, min_layers=4)


def compute_reference_divergences(student, teacher, labels, beta, temperature, **batch):
    """Computes the divergences by definition, from full logits."""
    student_log_probs = F.log_softmax(student(**batch).logits[:, :-1].float() / temperature, -1)
    with torch.no_grad():
        teacher_log_probs = F.log_softmax(teacher(**batch).logits[:, :-1].float() / temperature, -1)
    if beta == 0:
        divergences = (teacher_log_probs.exp() * (teacher_log_probs - student_log_probs)).sum(-1)
    elif beta == 1:
        divergences = (student_log_probs.exp() * (student_log_probs - teacher_log_probs)).sum(-1)
    else:
        mixture = (beta * teacher_log_probs.exp() + (1 - beta) * student_log_probs.exp()).log()
        divergences = (
            beta * teacher_log_probs.exp() * (teacher_log_probs - mixture)
            + (1 - beta) * student_log_probs.exp() * (student_log_probs - mixture)
        ).sum(-1)
    return divergences.masked_fill(labels[:, 1:] == -100, 0)


def measure_divergences(tiny_model, config, of_teacher, divergences_of, beta, temperature, sabotage=lambda: None):
    """Measures a token-weighted divergence loss and its gradients with respect to the student."""
    sabotage()
    student, teacher = (
        tiny_model.load(megatron_config=config).train(),
        tiny_model.load(megatron_config=of_teacher).eval(),
    )
    with torch.no_grad():
        for number, parameter in enumerate(teacher.parameters()):
            parameter.mul_(1 - 0.4 * (number % 3))
    [batch] = tiny_model.batches
    values = divergences_of(student, teacher, beta=beta, temperature=temperature, **batch)
    assert values.dtype == torch.float32
    loss = (values * torch.linspace(0.5, 1.5, values.numel()).view_as(values)).sum()
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    with torch.no_grad():
        recomputed = divergences_of(student.eval(), teacher, beta=beta, temperature=temperature, **batch)
        torch.testing.assert_close(recomputed, values.detach(), rtol=0, atol=1e-4)
    return Measurement(loss.item(), 0, 0, _full(student, _gradients(student))), values.detach()


def compute_worst_error(model_type, text, beta, temperature=1.0, of_teacher=None, **kwargs):
    config, other = layout(text), layout(of_teacher or text)
    source = tiny_model(model_type)
    [(expected, expected_values)] = run_ranks(
        measure_divergences, 1, source, None, None, compute_reference_divergences, beta, temperature
    )
    results = run_ranks(
        measure_divergences,
        count_ranks(config),
        source,
        config,
        other,
        token_kl_divergences,
        beta,
        temperature,
        **kwargs,
    )
    for measurement, values in results:
        torch.testing.assert_close(values, expected_values, rtol=1e-4, atol=1e-5)
        assert measurement.loss == results[0][0].loss
    errors = [error.value for error in gradient_errors(results[0][0], expected)]
    return max(*errors, abs(results[0][0].loss / expected.loss - 1) / 1e-5)


@pytest.mark.parametrize(
    ("model_type", "text", "beta", "temperature", "of_teacher"),
    [
        ("gemma2", "tp2", 0.0, 1.0, None),
        ("gemma2", "tp2", 1.0, 0.7, None),
        ("gemma2", "tp2", 0.3, 1.0, None),
        ("gemma2", "tp2+sp+pp2", 0.5, 2.0, None),
        ("gemma2", "pp2", 0.5, 1.0, None),
        ("llama", "cp2", 0.5, 1.0, None),
        ("llama", "tp2", 0.5, 1.0, "dp2+zero3"),
        ("llama", "pp2", 1.0, 1.0, "dp2+zero3"),
        ("llama", "pp2", 0.0, 1.0, "dp2+zero0"),
        ("llama", "tp2+pp2", 0.5, 1.0, "tp2+sp+pp2"),
        ("gpt2", "tp2+pp2", 0.5, 1.0, None),
        ("llama", "pp2 zbv", 0.5, 1.0, None),
        ("llama", "tp2+cp2", 0.5, 1.0, "tp2+dp2"),
    ],
)
def test_divergences(model_type, text, beta, temperature, of_teacher):
    assert compute_worst_error(model_type, text, beta, temperature, of_teacher) <= 1


@pytest.mark.parametrize("text", ["dp2+zero3", "pp2+dp2+zero3"])
def test_divergences_with_zero3(text):
    """All ranks compute the same loss, so the averaged gradients match the single-process run."""
    assert compute_worst_error("llama", text, 0.5) <= 1


def skip_vocab_reduction():
    vocab_divergence.reduce_over_vocabulary = lambda *args: None


def swap_kl_direction():
    original = vocab_divergence._terms
    vocab_divergence._terms = lambda student, teacher, beta: original(student, teacher, 1 - beta)


@pytest.mark.parametrize("sabotage", [skip_vocab_reduction, swap_kl_direction])
def test_faults_are_detected(sabotage):
    with pytest.raises(AssertionError):
        assert compute_worst_error("llama", "tp2", 1.0, sabotage=sabotage) <= 1


def test_no_vocab_sized_tensor_is_saved_for_backward(stories):
    """Single-process models: the divergence is computed in chunks of tokens."""
    models = [AutoModelForCausalLM.from_pretrained(stories) for _ in range(2)]
    ids = torch.arange(3, 403).view(4, 100)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_kl_divergences(*models, ids, input_ids=ids).sum().backward()
    assert max(sizes) < 400 * 512


def test_invalid_arguments_are_rejected(stories, tiny):
    student, teacher = AutoModelForCausalLM.from_pretrained(stories), AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ConfigError, match="vocabulary has 512 tokens, the teacher's 64"):
        token_kl_divergences(student, teacher, ids, input_ids=ids)
    with pytest.raises(ConfigError, match="beta = 2, temperature = 1.0: expected 0 <= beta <= 1"):
        token_kl_divergences(student, student, ids, beta=2, input_ids=ids)

    def expect_layout_error(text, of_teacher, message):
        models = [
            AutoModelForCausalLM.from_pretrained(stories, megatron_config=layout(one)) for one in (text, of_teacher)
        ]
        with pytest.raises(UnsupportedError, match=message):
            token_kl_divergences(*models, ids, input_ids=ids)

    run_ranks(expect_layout_error, 2, "pp2", "tp2", "pp_size=2, .*1f1b.*, the teacher tp_size=2, pp_size=1: ")
    run_ranks(expect_layout_error, 2, "pp2", "pp2 zbv", "1f1b.*, the teacher .*'zbv': ")

"""Tests of the fused linear cross entropy against torch on full logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hf_megatron.core.communication.collectives import bounds
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.tensor_parallel.cross_entropy import CrossEntropyOptions, linear_cross_entropy

TOKENS, HIDDEN = 11, 6


def _make_case(vocabulary, targets, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(vocabulary, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    if targets == "some ignored":
        labels[::3] = -100
    elif targets == "one valid":
        labels[1:] = -100
    return hidden, weight, bias, labels


def _on_rank(vocabulary, targets, chunk, denominator, smoothing, transform, dtype, with_bias):
    hidden, weight, bias, labels = _make_case(vocabulary, targets, dtype)
    start, stop = bounds(vocabulary, dist.get_world_size(), dist.get_rank())
    hidden.requires_grad_()
    local, local_bias = weight[start:stop].clone().requires_grad_(), bias[start:stop].clone().requires_grad_()
    options = CrossEntropyOptions(
        group=dist.group.WORLD,
        vocab_start=start,
        vocabulary=vocabulary,
        transform=_TRANSFORMS[transform],
        chunk_size=chunk,
        label_smoothing=smoothing,
    )
    loss = linear_cross_entropy(hidden, local, local_bias if with_bias else None, labels, denominator, options)
    (loss * 3).backward()
    return loss.item(), hidden.grad, local.grad, local_bias.grad


_TRANSFORMS = {
    "none": None,
    "soft-cap": lambda z: torch.tanh(z / 2.0) * 2.0,
    "scale": lambda z: z * 0.25,
}


def _compute_reference(vocabulary, targets, denominator, smoothing, transform, dtype, with_bias):
    hidden, weight, bias, labels = _make_case(vocabulary, targets, dtype)
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_()
    logits = F.linear(hidden, weight, bias if with_bias else None)
    if _TRANSFORMS[transform] is not None:
        logits = _TRANSFORMS[transform](logits)
    loss = F.cross_entropy(logits.float(), labels, reduction="sum", label_smoothing=smoothing)
    loss = loss / (denominator if denominator is not None else (labels != -100).sum())
    (loss * 3).backward()
    return loss.item(), hidden.grad, weight.grad, bias.grad


def _check(
    ranks,
    vocabulary=17,
    targets="some ignored",
    chunk=None,
    denominator=None,
    smoothing=0.0,
    transform="none",
    dtype=torch.float32,
    with_bias=False,
    tolerance=2e-6,
):
    results = run_ranks(
        _on_rank, ranks, vocabulary, targets, chunk, denominator, smoothing, transform, dtype, with_bias
    )
    loss, d_hidden, d_weight, d_bias = _compute_reference(
        vocabulary, targets, denominator, smoothing, transform, dtype, with_bias
    )
    for other_loss, other_hidden, _, _ in results:
        assert other_loss == pytest.approx(loss, rel=tolerance)
        torch.testing.assert_close(other_hidden, d_hidden, rtol=tolerance * 5, atol=tolerance)
    torch.testing.assert_close(torch.cat([f[2] for f in results]), d_weight, rtol=tolerance * 5, atol=tolerance)
    if with_bias:
        torch.testing.assert_close(torch.cat([f[3] for f in results]), d_bias, rtol=tolerance * 5, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_indivisible_vocabulary(ranks):
    _check(ranks)


def test_rank_without_vocabulary_entries():
    _check(4, vocabulary=5)


@pytest.mark.parametrize("chunk", [1, TOKENS - 1, TOKENS, 4])
def test_chunks(chunk):
    _check(2, chunk=chunk, with_bias=True)


def test_explicit_denominator():
    _check(2, denominator=29)
    _check(2, denominator=torch.tensor(29))


def test_one_valid_target():
    _check(2, targets="one valid", chunk=4)


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("transform", ["soft-cap", "scale"])
def test_soft_cap_and_scale(transform, chunk):
    _check(2, transform=transform, chunk=chunk)


@pytest.mark.parametrize("transform", ["none", "soft-cap"])
def test_label_smoothing(transform):
    _check(2, smoothing=0.1, transform=transform, chunk=4)


def test_bf16():
    _check(2, dtype=torch.bfloat16, tolerance=5e-3)
    _check(2, dtype=torch.bfloat16, chunk=4, tolerance=5e-3)


def test_all_ignored_is_nan_or_zero_with_denominator():
    def on_rank(denominator):
        hidden, weight, _, labels = _make_case(17, "all")
        start, stop = bounds(17, 2, dist.get_rank())
        labels[:] = -100
        local = weight[start:stop].requires_grad_()
        loss = linear_cross_entropy(
            hidden, local, None, labels, denominator, CrossEntropyOptions(dist.group.WORLD, start, 17)
        )
        loss.backward()
        return loss.item(), local.grad.abs().max().item()

    assert run_ranks(on_rank, 2, 7) == [(0.0, 0.0)] * 2
    assert all(loss != loss for loss, _ in run_ranks(on_rank, 2, None))


def test_full_logits_are_never_materialized():
    """No tensor has tokens x vocabulary entries, and with chunks none has tokens x local vocabulary."""

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, torch.Tensor):
                    self.size = max(self.size, value.numel())
            return result

    def on_rank(chunk):
        tokens, vocabulary, hidden_size = 64, 512, 4
        hidden = torch.randn(tokens, hidden_size, requires_grad=True)
        weight = torch.randn(vocabulary // 2, hidden_size, requires_grad=True)
        labels = torch.randint(0, vocabulary, (tokens,))
        options = CrossEntropyOptions(dist.group.WORLD, dist.get_rank() * 256, vocabulary, chunk_size=chunk)
        with Largest() as largest:
            linear_cross_entropy(hidden, weight, None, labels, None, options).backward()
        return largest.size

    assert run_ranks(on_rank, 2, None) == [64 * 256] * 2
    assert all(size <= 8 * 256 for size in run_ranks(on_rank, 2, 8))


def test_repeated_backward_with_retain_graph():
    """A split backward runs twice with the same gradient, a training loop with any."""

    def on_rank():
        hidden, weight, _, labels = _make_case(17, "all")
        start, stop = bounds(17, 1, 0)
        loss = linear_cross_entropy(
            hidden.requires_grad_(), weight, None, labels, None, CrossEntropyOptions(dist.group.WORLD, 0, 17)
        )
        loss.backward(retain_graph=True)
        once = hidden.grad.clone()
        loss.backward(retain_graph=True)
        torch.testing.assert_close(hidden.grad, 2 * once)
        (loss * 3).backward(retain_graph=True)
        torch.testing.assert_close(hidden.grad, 5 * once)
        loss.backward()
        with pytest.raises(RuntimeError, match="twice"):
            loss.backward()

    run_ranks(on_rank, 1)


def test_autocast_matches_torch():
    def on_rank():
        hidden, weight, _, labels = _make_case(17, "some ignored")
        start, stop = bounds(17, 2, dist.get_rank())
        local = weight[start:stop].clone().requires_grad_()
        hidden.requires_grad_()
        options = CrossEntropyOptions(dist.group.WORLD, start, 17, chunk_size=4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(hidden, local, None, labels, None, options)
        loss.backward()
        assert local.grad.dtype is hidden.grad.dtype is torch.float32
        return loss.item(), local.grad

    hidden, weight, _, labels = _make_case(17, "some ignored")
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    expected.backward()
    results = run_ranks(on_rank, 2)
    assert results[0][0] == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(torch.cat([f[1] for f in results]), weight.grad, rtol=2e-2, atol=2e-3)

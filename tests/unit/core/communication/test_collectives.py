"""Tests of the forward and backward of each collective against single-process formulas, for indivisible sizes too."""

import pytest
import torch
import torch.distributed as dist

from hf_megatron.core.communication import collectives as c
from hf_megatron.core.fork_harness import run_ranks


def _make_input(size: int) -> torch.Tensor:
    return torch.arange(2.0 * size * 3).view(2, size, 3)


def _on_rank(name: str, size: int):
    """Returns (forward equal, backward equal, output contiguous) for `sum(y * w)` with per-rank weights `w`."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    unsharded = _make_input(size)
    start, stop = c.bounds(size, ranks, rank)
    shard = unsharded[:, start:stop]
    inputs = [unsharded * (r + 1) for r in range(ranks)]
    weights = [torch.cos(unsharded + r) for r in range(ranks)]
    if name == "copy":
        x = unsharded.clone().requires_grad_()
        y = c.copy_to_ranks(x, group)
        forward, weight, backward = unsharded, weights[rank], sum(weights)
    elif name == "reduce":
        x = inputs[rank].clone().requires_grad_()
        y = c.reduce_from_ranks(x * 1, group)
        forward, weight, backward = sum(inputs), weights[0], weights[0]
    elif name == "split":
        x = unsharded.clone().requires_grad_()
        y = c.split_over_ranks(x, 1, group)
        forward, weight, backward = shard, weights[0][:, start:stop], weights[0]
    elif name in ("gather", "gather_sum"):
        x = shard.clone().requires_grad_()
        y = c.gather_from_ranks(x, 1, size, group, sum_gradient=name == "gather_sum")
        forward = unsharded
        weight = weights[rank] if name == "gather_sum" else weights[0]
        backward = (sum(weights) if name == "gather_sum" else weights[0])[:, start:stop]
    else:
        x = inputs[rank].clone().requires_grad_()
        y = c.reduce_scatter_to_ranks(x, 1, group)
        forward, weight, backward = sum(inputs)[:, start:stop], weights[0][:, start:stop], weights[0]
    (y * weight).sum().backward()
    return torch.allclose(y, forward), torch.allclose(x.grad, backward, atol=1e-5), y.is_contiguous()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["copy", "reduce", "split", "gather", "gather_sum", "reduce_scatter"])
def test_forward_and_backward(name, ranks):
    for size in (1, 5, 8):
        assert run_ranks(_on_rank, ranks, name, size) == [(True, True, True)] * ranks


def _find_errors():
    """Returns the cases (shape, dim, dtype) in which a result is wrong, or is a view."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    errors = []
    for shape, dim in [((1, 8, 3), 1), ((2, 8, 3), 1), ((1, 7, 3), 1), ((8, 2, 3), 0), ((2, 3, 8), -1), ((0, 8, 3), 1)]:
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            unsharded = torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype)
            shard = c.take_shard(unsharded, dim, group)
            gathered = c.all_gather(shard, dim, shape[dim], group)
            reduced = c.reduce_scatter(unsharded, dim, group)
            is_right = torch.equal(gathered, unsharded) and torch.equal(reduced, shard * ranks)
            is_own = all(tensor._base is None and tensor.is_contiguous() for tensor in (gathered, reduced))
            errors += [] if is_right and is_own else [(shape, dim, dtype)]
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("is_gloo", [True, False], ids=["gloo", "others"])
def test_shapes(ranks, is_gloo, monkeypatch):
    """gloo runs the collectives of other backends as well, so both branches are tested with values."""
    if not is_gloo:
        monkeypatch.setattr(c, "uses_gloo", lambda group: False)
        monkeypatch.setattr(c, "gathers_into_parts", lambda group: False)
    assert run_ranks(_find_errors, ranks) == [[]] * ranks

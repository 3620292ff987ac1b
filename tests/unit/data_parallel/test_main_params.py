"""Tests of how main params follow the model's parameters, and of the memory that this reads."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_megatron.data_parallel import main_params
from hf_megatron.data_parallel.main_params import MainParam, follow_parameters


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write, without views, and the largest tensor that one of them creates."""

    def __init__(self):
        super().__init__()
        self.moved = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            created = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
            read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            self.moved += sum(value.numel() * value.element_size() for value in (*read, *created))
            self.largest = max([self.largest, *(value.numel() for value in created)])
        return result


def make_main_param(entries, dtype=torch.bfloat16):
    parameter = nn.Parameter(torch.randn(entries).to(dtype))
    return MainParam("weight", parameter, 0, entries, parameter.detach().float() + 1e-4, separate=True, flat=False)


def written_back(leaf):
    with torch.no_grad():
        leaf.parameter.copy_(leaf.tensor)
    return leaf


# Reading the result: cast (4 + 2) and comparison (2 + 2). On the device: cast, comparison (2 + 2 + 1), selection
# (1 + 4 + 2 + 4) and copy (4 + 4 + 4, as the target counts as read).
@pytest.mark.parametrize(("may_wait", "bytes_per_entry"), [(True, 10), (False, 34)])
def test_parameters_are_followed_in_chunks(monkeypatch, may_wait, bytes_per_entry):
    """A bf16 entry and its fp32 main param are read once from memory; intermediate chunks stay in the cache."""
    monkeypatch.setattr(main_params, "_CHUNK", 1024)
    leaves = [written_back(make_main_param(entries)) for entries in (4096, 5000, 3)]
    before = [leaf.tensor.clone() for leaf in leaves]
    with Traffic() as traffic, torch.no_grad():
        follow_parameters(leaves, main_weights=True, may_wait=may_wait)
    entries = sum(leaf.tensor.numel() for leaf in leaves)
    assert traffic.moved <= bytes_per_entry * entries
    assert traffic.largest <= 1024
    assert all(torch.equal(leaf.tensor, kept) for leaf, kept in zip(leaves, before, strict=True))


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize(
    "edit",
    [
        lambda weight: weight.data.neg_(),
        lambda weight: weight.data.copy_(weight.data.flip(0)),
        lambda weight: weight.data[-1:].mul_(2),
        lambda weight: weight.detach().zero_(),
        lambda weight: weight.data[:1].fill_(float("nan")),
    ],
    ids=["sign", "order", "one entry", "in place", "nan"],
)
def test_edits_reach_main_params(monkeypatch, edit, may_wait):
    monkeypatch.setattr(main_params, "_CHUNK", 100)
    leaf = written_back(make_main_param(350))
    kept = leaf.tensor.clone()
    edit(leaf.parameter)
    is_edited = leaf.parameter.detach() != kept.bfloat16()
    with torch.no_grad():
        follow_parameters([leaf], main_weights=True, may_wait=may_wait)
    expected = torch.where(is_edited, leaf.parameter.detach().float(), kept)
    torch.testing.assert_close(leaf.tensor, expected, rtol=0, atol=0, equal_nan=True)

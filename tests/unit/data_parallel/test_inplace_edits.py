"""Tests of the checksums of weights."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hf_megatron.data_parallel import inplace_edits
from hf_megatron.data_parallel.inplace_edits import Contents

DTYPES = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def make_weight(size, dtype):
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", [1, 7, 64, 1000])
def test_parts_have_the_sum_of_one_pass(monkeypatch, dtype, part):
    monkeypatch.setattr(inplace_edits, "_PART", part)
    for weight in (make_weight(101, dtype), make_weight(101, dtype).T, make_weight(1, dtype)[:, 0]):
        assert inplace_edits._sum_bits(weight) == weight.contiguous().view(DTYPES[dtype]).sum()


@pytest.mark.parametrize("index", [0, 63, 64, 302])
def test_edits_of_each_part_raise(monkeypatch, index):
    monkeypatch.setattr(inplace_edits, "_PART", 64)
    weight = make_weight(101, torch.float32)
    contents = Contents([weight])
    contents.check("a weight")
    weight.data.view(-1)[index].neg_()
    with pytest.raises(RuntimeError, match="was edited between the forward and its backward"):
        contents.check("a weight")


@pytest.mark.parametrize("fault", [False, True])
def test_checksums_copy_a_part_at_a_time(monkeypatch, fault):
    """With the fault, the weight is added up in one pass, for which torch copies it to int64."""
    weight = make_weight(1 << 18, torch.float32)
    if fault:
        monkeypatch.setattr(inplace_edits, "_PART", weight.numel())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        Contents([weight])
    events = measured.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert (largest == 2 * weight.nbytes) if fault else (largest <= weight.nbytes / 2)

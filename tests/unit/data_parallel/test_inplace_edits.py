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
@pytest.mark.parametrize("layout", ["even", "odd", "offset", "transposed", "single"])
def test_an_edit_of_any_entry_raises(dtype, layout):
    weight = make_weight(6, dtype)
    weight = {
        "even": weight,
        "odd": weight[:5],
        "offset": weight.view(-1)[1:],
        "transposed": weight.T,
        "single": weight[0, 0],
    }[layout]
    contents = Contents([weight])
    contents.check("a weight")
    entries = weight.data.view(-1) if weight.is_contiguous() else weight.data[1]
    for index in range(len(entries)):
        kept = entries[index].clone()
        entries[index].neg_()
        with pytest.raises(RuntimeError, match="was edited between the forward and its backward"):
            contents.check("a weight")
        entries[index].copy_(kept)
        contents.check("a weight")


@pytest.mark.parametrize("fault", [False, True])
def test_checksums_copy_nothing(monkeypatch, fault):
    """With the fault, entries are added up one by one, for which torch copies the weight to int64."""
    weight = make_weight(1 << 18, torch.float32)
    if fault:
        monkeypatch.setattr(inplace_edits, "_WORD", 1 << 40)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        Contents([weight])
    events = measured.profiler.kineto_results.events()
    largest = max(event.nbytes() for event in events if event.name() == "[memory]")
    assert (largest == 2 * weight.nbytes) if fault else (largest < 1000)

"""Tests that masks from cached packing metadata equal the masks of transformers."""

import pytest
import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    find_packed_sequence_indices,
    sliding_window_causal_mask_function,
)

from hf_megatron.data_parallel.packed_sequences import PackingInfo, _mask
from hf_megatron.data_parallel.packed_sequences import find_packed_sequence_indices as find

STOCK = getattr(find_packed_sequence_indices, "__wrapped__", find_packed_sequence_indices)
FULL, RIGHT, LEFT = ([[1] * 6] * 2, [[1] * 6, [1, 1, 1, 1, 0, 0]], [[0, 0, 1, 1, 1, 1], [1] * 6])
FUNCTIONS = {
    "causal": (causal_mask_function, {"allow_is_causal_skip": True}),
    "window": (sliding_window_causal_mask_function(3), {"allow_is_causal_skip": True, "local_size": 3}),
    "bidirectional": (
        bidirectional_mask_function,
        {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True},
    ),
}


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize(("function", "options"), FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("rows", [FULL, RIGHT, LEFT], ids=["full", "right", "left"])
def test_masks_match_transformers(name, function, options, rows):
    attention_mask = torch.tensor(rows)
    bool_mask = attention_mask.bool()
    packing = PackingInfo([{"attention_mask": attention_mask}])
    packing.note_mask(attention_mask, bool_mask)
    assert packing.hides_tokens(bool_mask) is (rows is not FULL)
    stock = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function, **options}
    expected = stock(**sizes, attention_mask=bool_mask)
    mask = _mask(stock, [packing], **sizes, attention_mask=bool_mask)
    assert (mask is None) == (expected is None)
    assert expected is None or torch.equal(mask, expected)


def test_unrelated_mask_has_no_packing_info():
    attention_mask = torch.ones(2, 6)
    packing = PackingInfo([{"attention_mask": attention_mask}])
    assert packing.hides_tokens(torch.ones(2, 6)) is None
    packing.note_mask(attention_mask.clone(), torch.zeros(2, 6))
    assert packing.hides_tokens(attention_mask) is None and packing.begins_anew(attention_mask) is None


def test_packing_info_is_per_microbatch(monkeypatch):
    full_batch = {
        "attention_mask": torch.tensor([*FULL, *RIGHT]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5]] * 4),
    }
    full_batch["position_ids"][3] = torch.tensor([0, 1, 0, 1, 2, 3])
    microbatches = [{name: value[start : start + 2] for name, value in full_batch.items()} for start in (0, 2)]
    packing = PackingInfo(microbatches)
    for microbatch in microbatches:
        packing.note_mask(microbatch["attention_mask"], microbatch["attention_mask"])
    tolist_calls = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: tolist_calls.append(1) or tolist(self))
    assert [packing.hides_tokens(microbatch["attention_mask"]) for microbatch in microbatches] == [False, True]
    assert [packing.begins_anew(microbatch["position_ids"]) for microbatch in microbatches] == [False, True]
    assert len(tolist_calls) == 1


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]] * 2, [[0, 1, 0, 1], [0, 0, 1, 2]], [[3, 4, 5, 6], [0, 1, 5, 6]]])
def test_packed_sequence_indices_match_transformers(rows, monkeypatch):
    positions = torch.tensor(rows)
    packing = PackingInfo([{"position_ids": positions}])
    monkeypatch.setattr("hf_megatron.data_parallel.packed_sequences._active_forwards", lambda: [packing])
    expected, indices = STOCK(positions), find(STOCK, positions)
    assert (indices is None) == (expected is None)
    assert expected is None or torch.equal(indices, expected)


def test_custom_mask_function_gets_transformers_arguments():
    mask = torch.tensor(RIGHT)
    packing = PackingInfo([{"attention_mask": mask}])
    packing.note_mask(mask, mask)
    calls = []

    def record_call(*, attention_mask, mask_function, batch_size, q_length, kv_length):
        calls.append((attention_mask, mask_function, batch_size, q_length, kv_length))

    _mask(record_call, [packing], batch_size=2, q_length=6, kv_length=6, mask_function=None, attention_mask=mask)
    assert calls == [(mask, None, 2, 6, 6)]

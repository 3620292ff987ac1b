"""What is known of a call's rows gives the masks that transformers makes when it asks for itself."""

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
def test_masks_are_those_of_transformers(name, function, options, rows):
    given = torch.tensor(rows)
    made = given.bool()
    known = PackingInfo([{"attention_mask": given}])
    known.note_mask(given, made)
    assert known.hides_tokens(made) is (rows is not FULL)
    stock = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function, **options}
    expected = stock(**sizes, attention_mask=made)
    found = _mask(stock, [known], **sizes, attention_mask=made)
    assert (found is None) == (expected is None)
    assert expected is None or torch.equal(found, expected)


def test_what_is_no_mask_of_the_call_is_not_known():
    given = torch.ones(2, 6)
    known = PackingInfo([{"attention_mask": given}])
    assert known.hides_tokens(torch.ones(2, 6)) is None
    known.note_mask(given.clone(), torch.zeros(2, 6))
    assert known.hides_tokens(given) is None and known.begins_anew(given) is None


def test_each_microbatch_has_its_own_answer(monkeypatch):
    full_batch = {
        "attention_mask": torch.tensor([*FULL, *RIGHT]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5]] * 4),
    }
    full_batch["position_ids"][3] = torch.tensor([0, 1, 0, 1, 2, 3])
    parts = [{name: value[start : start + 2] for name, value in full_batch.items()} for start in (0, 2)]
    known = PackingInfo(parts)
    for part in parts:
        known.note_mask(part["attention_mask"], part["attention_mask"])
    asked = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or tolist(self))
    assert [known.hides_tokens(part["attention_mask"]) for part in parts] == [False, True]
    assert [known.begins_anew(part["position_ids"]) for part in parts] == [False, True]
    assert len(asked) == 1


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]] * 2, [[0, 1, 0, 1], [0, 0, 1, 2]], [[3, 4, 5, 6], [0, 1, 5, 6]]])
def test_documents_are_those_of_transformers(rows, monkeypatch):
    positions = torch.tensor(rows)
    known = PackingInfo([{"position_ids": positions}])
    monkeypatch.setattr("hf_megatron.data_parallel.packed_sequences._active_forwards", lambda: [known])
    expected, found = STOCK(positions), find(STOCK, positions)
    assert (found is None) == (expected is None)
    assert expected is None or torch.equal(found, expected)


def test_a_function_of_the_users_is_called_with_what_transformers_gives():
    given = torch.tensor(RIGHT)
    known = PackingInfo([{"attention_mask": given}])
    known.note_mask(given, given)
    calls = []

    def own(*, attention_mask, mask_function, batch_size, q_length, kv_length):
        calls.append((attention_mask, mask_function, batch_size, q_length, kv_length))

    _mask(own, [known], batch_size=2, q_length=6, kv_length=6, mask_function=None, attention_mask=given)
    assert calls == [(given, None, 2, 6, 6)]

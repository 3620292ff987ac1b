"""Tests of splitting a packed sequence into microbatches."""

import pytest
import torch
from transformers import LlamaConfig

from hf_megatron.data_parallel.dynamic_rope import scales_by_length
from hf_megatron.pipeline_parallel.packed_sequences import PackedRow

LENGTHS = (9, 4, 13, 2)


def make_inputs(lengths=LENGTHS, **changes):
    ids = torch.arange(sum(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100), **changes}


@pytest.mark.parametrize(
    ("count", "lengths"), [(1, [28]), (2, [13, 15]), (3, [9, 4, 15]), (4, [9, 4, 13, 2]), (9, [9, 4, 13, 2])]
)
def test_packed_sequence_is_split_into_near_equal_shares(count, lengths):
    microbatches = PackedRow.of_call(make_inputs()).microbatches(count)
    assert [microbatch["input_ids"].shape[1] for microbatch in microbatches] == lengths
    assert torch.equal(torch.cat([microbatch["labels"] for microbatch in microbatches], 1), make_inputs()["labels"])


def test_flash_arguments_match_the_microbatch():
    ends = torch.tensor([0, 9, 13, 26, 28], dtype=torch.int32)
    inputs = make_inputs(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=13, max_length_k=13)
    first, second = PackedRow.of_call(inputs).microbatches(2)
    assert first["cu_seq_lens_q"].tolist() == [0, 9, 13] and second["cu_seq_lens_k"].tolist() == [0, 13, 15]
    assert (first["max_length_q"], second["max_length_k"]) == (9, 13)
    assert first["cu_seq_lens_q"].dtype == torch.int32


def test_borders_need_positions_and_cu_seq_lens():
    ends = torch.tensor([0, 13, 28])
    assert PackedRow.of_call(make_inputs(cu_seq_lens_q=ends, cu_seq_lens_k=ends)).borders == (13,)
    # A document end inside continuing positions is not a border for position-based attention.
    continued = make_inputs((13, 15), cu_seq_lens_q=torch.tensor([0, 9, 13, 28]))
    assert PackedRow.of_call(continued).borders == (13,)


def test_label_across_a_border_joins_documents():
    labels = make_inputs()["labels"].clone()
    labels[0, 13] = 13
    assert PackedRow.of_call(make_inputs(labels=labels)).borders == (9, 26)
    assert PackedRow.of_call(make_inputs(labels=labels, shift_labels=labels)).borders == (9, 13, 26)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": torch.ones(1, 28, dtype=torch.int64)},
        {"position_ids": torch.arange(28).unsqueeze(0)},
        {"position_ids": None},
        {"position_ids": torch.zeros(3, 1, 28, dtype=torch.int64)},
        {"pixel_values": torch.zeros(1, 3, 8, 8)},
        {"extra": torch.zeros(28)},
        {"is_causal": False},
        {"logits_to_keep": 4},
        {"input_ids": torch.zeros(2, 28, dtype=torch.int64)},
    ],
    ids=str,
)
def test_unpacked_inputs_are_not_split(changes):
    assert PackedRow.of_call(make_inputs(**changes)) is None


def test_length_dependent_rope_is_detected():
    assert not scales_by_length(LlamaConfig())
    assert scales_by_length(LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}))
    layers = {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}}
    config = LlamaConfig()
    config.rope_parameters = layers
    assert scales_by_length(config)

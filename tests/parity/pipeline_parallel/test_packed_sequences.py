"""Parity tests of packed sequences that are cut between documents into microbatches."""

import dataclasses
import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron import RankError
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.pipeline_parallel import packed_sequences
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

DOCUMENTS = (9, 4, 13, 2, 11, 7)
LAYOUTS = {
    "pp2": {"pp_size": 2, "num_microbatches": 4},
    "pp2 zbv": {"pp_size": 2, "num_microbatches": 4, "pipeline_schedule": "zbv"},
    "tp2+sp+pp2": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 3},
    "pp2+cp2": {"pp_size": 2, "cp_size": 2, "num_microbatches": 3},
    "pp2+dp2": {"pp_size": 2, "dp_size": 2, "num_microbatches": 3},
    "pp2+dp2+zero3": {"pp_size": 2, "dp_size": 2, "zero_stage": 3, "num_microbatches": 3},
}


@functools.lru_cache(maxsize=3)
def get_packed_tiny_model(model_type, rows=1, kind="labels"):
    """Returns a tiny model with packed batches: one sequence for each of `rows` dp ranks."""
    base = make_tiny_model(CONFIG_MAPPING[model_type](), min_layers=4)
    batches = [make_packed_batch(base.config.get_text_config().vocab_size, rows, seed, kind) for seed in range(2)]
    reference = measure(base.load(), batches)
    reference.without, reference.cancelled = base.reference.without, base.reference.cancelled
    return dataclasses.replace(base, batches=batches, reference=reference)


def make_packed_batch(vocabulary, rows, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (rows, sum(DOCUMENTS)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).repeat(rows, 1)
    labels = ids.masked_fill(positions == 0, -100)
    labels[:, 30 : 33 + seed] = -100
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False}
    if kind == "joined":
        # The last token of a document predicts the first of the next: no microbatch may end between them.
        labels[:, 13] = ids[:, 13]
    if kind == "is_causal":
        batch["is_causal"] = False
    if kind == "shifted":
        batch["shift_labels"] = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    return batch


def require_microbatch_counts(counts):
    """Returns a `prepare` that requires training calls to have one of `counts` microbatches with a weight."""

    def prepare(model):
        batches = parallel_state(model).pipeline.batches
        original, calls = batches.prepare, []

        def check_microbatches(arguments, *, for_backward, **kwargs):
            microbatches = original(arguments, for_backward=for_backward, **kwargs)
            parts = sum(weight > 0 for weight in microbatches.weights)
            assert not for_backward or parts in counts, parts
            calls.append(parts)
            return microbatches

        batches.prepare = check_microbatches

    return prepare


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_match_single_process(name):
    layout = LAYOUTS[name]
    tiny_model = get_packed_tiny_model("llama", layout.get("dp_size", 1))
    counts = {layout["num_microbatches"], layout["num_microbatches"] - 1}
    comparison = check_tiny_model(tiny_model, ConfigUnderTest(**layout), prepare=require_microbatch_counts(counts))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("model_type", "kind", "counts"),
    [
        ("mistral", "labels", {4}),
        ("gemma3_text", "labels", {4}),
        ("qwen3_moe", "labels", {4}),
        ("gpt2", "labels", {4}),
        ("llama", "joined", {4}),
        ("llama", "shifted", {4}),
        # Has no effect with the mask of packed documents; the batch is not split.
        ("llama", "is_causal", {1}),
        # Its linear attention carries states into the next document; the batch is not split.
        ("qwen3_next", "labels", {1}),
    ],
)
def test_types_and_targets_match_single_process(model_type, kind, counts):
    layout = ConfigUnderTest(pp_size=2, num_microbatches=4)
    comparison = check_tiny_model(
        get_packed_tiny_model(model_type, kind=kind), layout, prepare=require_microbatch_counts(counts)
    )
    assert comparison.passed, comparison.report()


def cut_inside_documents():
    stock = packed_sequences.PackedRow.of_call.__func__

    def shift_borders(cls, arguments):
        packed_row = stock(cls, arguments)
        return packed_row and dataclasses.replace(
            packed_row, borders=tuple(border + 1 for border in packed_row.borders)
        )

    packed_sequences.PackedRow.of_call = classmethod(shift_borders)


def ignore_cross_document_targets():
    packed_sequences.IGNORE_INDEX, stock = None, packed_sequences.PackedRow.of_call.__func__

    def drop_labels(cls, arguments):
        packed_row = stock(cls, {name: value for name, value in arguments.items() if name != "labels"})
        return packed_row and dataclasses.replace(packed_row, arguments=arguments)

    packed_sequences.PackedRow.of_call = classmethod(drop_labels)


@pytest.mark.parametrize(
    ("fault", "kind"), [(cut_inside_documents, "labels"), (ignore_cross_document_targets, "joined")]
)
def test_seeded_faults_are_detected(fault, kind):
    layout = ConfigUnderTest(pp_size=2, num_microbatches=4)
    try:
        passed = check_tiny_model(get_packed_tiny_model("llama", kind=kind), layout, sabotage=fault).passed
    except RankError as error:
        assert "terms" in str(error) or "Assertion" in str(error), error
        passed = False
    assert not passed

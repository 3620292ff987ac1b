"""Tests of tokens and labels outside the vocabulary: every rank raises `IndexError`, and none hangs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import RankError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.tensor_parallel import vocab_parallel_head
from hf_megatron.tensor_parallel.token_log_probs import token_log_probs

VOCABULARY = 512
LAYOUTS = ["tp2", "tp2+sp", "pp2", "tp2+pp2", "dp2"]


def load_model(stories, layout=None):
    config = None
    if layout is not None:
        [config] = parse_layouts(layout)
    return AutoModelForCausalLM.from_pretrained(stories, megatron_config=config), config


def make_batch(name, value):
    ids = torch.arange(3, 27).view(2, 12)
    labels = ids.clone()
    labels[:, :3] = -100
    batch = {"input_ids": ids, "labels": labels}
    batch[name] = batch[name].clone()
    batch[name][:, 7] = value
    return batch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_outside_the_vocabulary_raise(stories, layout):
    cases = [("input_ids", VOCABULARY), ("input_ids", -1), ("labels", VOCABULARY), ("labels", -1)]
    model, config = load_model(stories, None)[0], parse_layouts(layout)[0]

    def require_index_errors(model):
        for name, value in cases:
            for training in (True, False):
                model.train(training)
                with torch.set_grad_enabled(training), pytest.raises(IndexError):
                    model(**make_batch(name, value))
        return True

    def on_rank():
        model = load_model(stories, layout)[0]
        assert require_index_errors(model)
        # The model still works after the errors.
        return model.train()(**make_batch("labels", 5)).loss.item()

    assert require_index_errors(model)
    expected = model.train()(**make_batch("labels", 5)).loss.item()
    assert run_ranks(on_rank, config.ranks_per_replica * (config.dp_size or 1)) == [
        pytest.approx(expected, rel=1e-5)
    ] * (config.ranks_per_replica * (config.dp_size or 1))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_log_prob_labels_outside_the_vocabulary_raise(stories, layout):
    def on_rank():
        model = load_model(stories, layout)[0]
        for name, value in (("labels", VOCABULARY), ("labels", -1), ("input_ids", VOCABULARY)):
            with pytest.raises(IndexError):
                token_log_probs(model, **make_batch(name, value))

    run_ranks(on_rank, 2)


def test_missing_token_check_is_detected(stories):
    """Seeded fault: without the range check, no rank owns the vocabulary entry and none raises."""

    def on_rank():
        from hf_megatron.tensor_parallel import cross_entropy, embedding

        embedding.require_tokens = cross_entropy.require_tokens = lambda *args: None
        with pytest.raises(IndexError):
            load_model(stories, "tp2")[0](**make_batch("input_ids", VOCABULARY))

    with pytest.raises(RankError, match="DID NOT RAISE"):
        run_ranks(on_rank, 2)


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp", "cp2", "tp2+cp2", "dp2"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int16])
def test_labels_of_other_dtypes_raise(stories, layout, kind):
    """torch's cross entropy takes class indices of 64 bits only; so does the vocab-parallel one, with its message."""

    def read_error(config=None):
        model = load_model(stories, config)[0].train()
        batch = make_batch("labels", 5)
        batch["labels"] = batch["labels"].to(kind)
        with pytest.raises(RuntimeError) as error:
            model(**batch)
        return str(error.value)

    expected, config = read_error(), parse_layouts(layout)[0]
    ranks = config.ranks_per_replica * (config.dp_size or 1)
    assert run_ranks(lambda: read_error(layout), ranks) == [expected] * ranks


def test_unchecked_label_dtype_is_detected(stories):
    def on_rank():
        vocab_parallel_head.require_class_indices = lambda targets: None
        model = load_model(stories, "tp2+sp")[0].train()
        batch = make_batch("labels", 5)
        return model(**batch | {"labels": batch["labels"].to(torch.int32)}).loss.item()

    assert all(loss > 0 for loss in run_ranks(on_rank, 2))

"""Tests of `ignore_mismatched_sizes=True`: weights of another shape are drawn anew, as in a single process."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

from hf_megatron import CheckpointError, local_named_parameters
from hf_megatron.checkpoint import initialize
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.training import count_ranks, gather_full_tensors, parse_layout

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name -> class, model to save, and the arguments that change shapes.
CASES = {
    "classes of BERT": (AutoModelForSequenceClassification, BertForSequenceClassification, {"num_labels": 5}),
    "token types of BERT": (AutoModelForSequenceClassification, BertForSequenceClassification, {"type_vocab_size": 4}),
    "classes of Llama": (AutoModelForTokenClassification, LlamaForTokenClassification, {"num_labels": 5}),
    "vocabulary of Llama": (AutoModelForCausalLM, LlamaForCausalLM, {"vocab_size": 71}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns the folder of each case's checkpoint, with three labels."""
    folders = {}
    for case, (_, cls, _) in CASES.items():
        folders[case] = tmp_path_factory.mktemp("checkpoint")
        config = BertConfig(**SIZES, **NO_DROPOUT) if "BERT" in case else LlamaConfig(**SIZES)
        config.num_labels, config.pad_token_id, config.classifier_dropout = 3, 0, 0.0
        torch.manual_seed(0)
        cls(config).save_pretrained(folders[case])
    return folders


def load(path, case, text=None, **kwargs):
    auto, _, changes = CASES[case]
    config = None if text is None else parse_layout(text)
    return auto.from_pretrained(path, megatron_config=config, **changes, **kwargs).train()


def load_and_step(path, case, text=None):
    torch.manual_seed(7)
    model = load(path, case, text, ignore_mismatched_sizes=True)
    draws = torch.rand(2).tolist()
    weights = gather_full_tensors(model, dict(local_named_parameters(model)))
    ids = torch.randint(3, 64, (4, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(4) % 3 if "Sequence" in type(model).__name__ else ids % 3
    # All ranks have the same samples, so that their mean gradient is that of a single process.
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
    loss.backward()
    return loss.item(), draws, {name: weight for name, weight in weights.items() if weight is not None}


def compare(path, case, text):
    [(loss, draws, weights)] = run_ranks(load_and_step, 1, path, case)
    results = run_ranks(load_and_step, count_ranks(parse_layout(text)), path, case, text)
    names = set()
    for rank_loss, rank_draws, rank_weights in results:
        for name, weight in rank_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=0, msg=name)
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        assert rank_draws == draws
        names |= rank_weights.keys()
    assert names == weights.keys()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero3", "dp2", "cp2"])
def test_other_shapes_are_drawn_as_in_one_process(checkpoints, text, case):
    if text == "cp2":
        case = "vocabulary of Llama"
    compare(checkpoints[case], case, text)


def test_separate_random_states_of_stages_are_detected(checkpoints, monkeypatch):
    share = initialize.share_generator
    # Every stage draws from the first one's random state.
    monkeypatch.setattr(initialize, "share_generator", lambda source: share(0) if source == 0 else None)
    with pytest.raises(AssertionError):
        compare(checkpoints["vocabulary of Llama"], "vocabulary of Llama", "pp2")


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_error_names_the_argument(checkpoints, text):
    path, case = checkpoints["classes of Llama"], "classes of Llama"

    def on_rank():
        message = (
            r"score.weight: file \(3, 32\), model \(5, 32\).*Pass ignore_mismatched_sizes=True to initialize the mis"
        )
        with pytest.raises(CheckpointError, match=message):
            load(path, case, text)
        return load_and_step(path, case, text)[0]

    [(expected, *_)] = run_ranks(load_and_step, 1, path, case)
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-5)] * 2
